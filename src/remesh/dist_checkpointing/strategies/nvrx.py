"""Answers to what training loops ask of the optional resiliency package: background saves here never use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def has_nvrx_async_support() -> bool:
    """Whether its background saves are used; they are not."""
    return False


def is_nvrx_min_version(version: str) -> bool:
    """Whether that version or a later one is used; none is."""
    return False


def make_nvrx_async_request(
    async_request_cls: Callable[..., Any],
    async_fn: Callable[..., Any] | None,
    async_fn_args: Any,
    finalize_fns: list[Callable[[], None]],
    async_fn_kwargs: dict[str, Any] | None = None,
    preload_fn: Callable[[], Any] | None = None,
) -> Any:
    """A request of the class that `get_async_strategy` names, which is this package's."""
    more = {"async_fn_kwargs": async_fn_kwargs or {}, "preload_fn": preload_fn}
    return async_request_cls(async_fn, async_fn_args, finalize_fns, **more)
