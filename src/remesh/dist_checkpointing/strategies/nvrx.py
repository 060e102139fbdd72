"""Is the optional resiliency package in use for background saves? Never: workers here need nothing of it."""

from __future__ import annotations


def has_nvrx_async_support() -> bool:
    """Whether its background saves are used; they are not."""
    return False


def is_nvrx_min_version(version: str) -> bool:
    """Whether that version or a later one is used; none is."""
    return False
