"""What in a process stands against an image of it? `check_imageable` looks from outside and stops nothing."""

from __future__ import annotations

from remesh.transparent.images.kinds import Refusal


def check_imageable(pid: int) -> list[Refusal]:
    """Everything about a running process that an image cannot hold, each by name; empty when it can be imaged."""
    raise NotImplementedError
