"""Which mesh? Turns a template and the number of live workers into a shape, and says why.

A template maps axis names to sizes, outermost first; ``-1`` marks the one axis that takes whatever is left.
``{"dp": -1, "tp": 2}`` over 7 workers is ``dp=3 x tp=2`` with one worker standing by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from remesh.errors import ConfigError

FREE = -1
"""Size of the axis that takes the workers left over by the fixed axes."""


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """The chosen mesh, how many workers it leaves out, and the reason in words."""

    axes: dict[str, int]
    """Size of each axis, outermost first. Invariant: every size >= 1."""
    num_standby: int
    """Workers that are alive but find no place. Invariant: >= 0."""
    reason: str

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())


def check_template(template: Mapping[str, int]) -> None:
    """Raise ConfigError unless every axis is a positive size, or the one free axis."""
    free = [axis for axis, size in template.items() if size == FREE]
    wrong = {axis: size for axis, size in template.items() if not isinstance(size, int) or (size < 1 and size != FREE)}
    if wrong or len(free) > 1 or not template:
        raise ConfigError(
            f"reading mesh template {dict(template)}: expected sizes >= 1 and at most one {FREE} (the axis that takes "
            f"all workers left), found {wrong or free or 'no axis'}; name each axis once, as in {{'dp': -1, 'tp': 2}}"
        )


def decide_mesh(template: Mapping[str, int], num_workers: int) -> MeshChoice | str:
    """The largest mesh of this template over ``num_workers``, or the reason why none fits."""
    check_template(template)
    fixed = math.prod(size for size in template.values() if size != FREE)
    if num_workers < fixed:
        return f"mesh {format_axes(template)} needs at least {fixed} workers, {num_workers} are alive"
    has_free_axis = FREE in template.values()
    free = num_workers // fixed if has_free_axis else 1
    axes = {axis: free if size == FREE else size for axis, size in template.items()}
    standby = num_workers - free * fixed
    reason = f"{num_workers} workers fit {format_axes(axes)}"
    if standby:
        reason += f", {standby} stand by"
    return MeshChoice(axes, standby, reason)


def format_axes(axes: Mapping[str, int]) -> str:
    """``dp=2 x tp=2``; a free axis shows as ``dp=any``."""
    return " x ".join(f"{axis}={'any' if size == FREE else size}" for axis, size in axes.items())
