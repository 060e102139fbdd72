"""Choice of the mesh: from a template and the number of live workers, a shape and the reason for it.

A *template* maps axis names to sizes, outermost first. A size is a number; a list of numbers to choose from, the first
one preferred; or ``-1`` for the one axis that takes whatever is left. ``{"dp": -1, "tp": 2}`` over 7 workers is
``dp=3 x tp=2`` with one worker on standby. A template may know how much *memory* a worker needs and has.

The choice, in steps:

1. Every combination of sizes to choose from; the free axis takes what the others leave.
2. Those that need more workers than are alive, or more memory than a worker has, are out.
3. Of the others the one that puts most workers to work; of equals the one whose sizes stand first in their lists, the
   outermost axis counting most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from remesh.foundation.errors import ConfigError

FREE = -1
"""Size of the axis that takes the workers left over by the other axes."""

Axes = Mapping[str, int | Sequence[int]]
"""What a user writes: sizes, or lists of them, by axis."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a worker needs on a mesh, and the memory that it has."""

    limit_bytes: int
    """Room on each worker. Invariant: >= 1."""
    sharded_bytes: int
    """Whole size of what is divided over the axes in ``over``. Invariant: >= 0."""
    over: tuple[str, ...]
    """Axes that divide it; the others hold replicas."""
    fixed_bytes: int = 0
    """What every worker holds besides, on any mesh. Invariant: >= 0."""

    def __post_init__(self) -> None:
        if self.limit_bytes < 1 or self.sharded_bytes < 0 or self.fixed_bytes < 0:
            raise ConfigError(
                f"describing a worker's memory: limit {self.limit_bytes}, sharded {self.sharded_bytes} and fixed "
                f"{self.fixed_bytes} bytes, expected a limit of at least 1 and nothing negative; correct the numbers"
            )

    def needed_bytes(self, axes: Mapping[str, int]) -> int:
        """The memory that a worker needs on this mesh, in bytes.

        >>> Memory(limit_bytes=100, sharded_bytes=120, over=("tp",), fixed_bytes=5).needed_bytes({"dp": 3, "tp": 2})
        65
        """
        return self.fixed_bytes + -(-self.sharded_bytes // math.prod(axes[axis] for axis in self.over))


@dataclass(frozen=True, slots=True)
class Template:
    """The meshes that a job can take."""

    axes: Mapping[str, tuple[int, ...]]
    """Sizes to choose from for each axis, outermost first. Invariant: none empty; >= 1, or `FREE` alone on one axis."""
    memory: Memory | None = None
    """None when any mesh fits."""

    def __post_init__(self) -> None:
        free = [axis for axis, sizes in self.axes.items() if FREE in sizes]
        wrong = {
            axis: list(sizes) for axis, sizes in self.axes.items() if not sizes or not all(map(_is_size, sizes))
        } or {axis: list(self.axes[axis]) for axis in free if len(self.axes[axis]) > 1}
        if wrong or len(free) > 1 or not self.axes:
            raise ConfigError(
                f"reading mesh template {plain(self.axes)}: expected sizes >= 1, lists of them, and at most one {FREE} "
                f"(the axis that takes all workers left), found {wrong or free or 'no axis'}; name each axis once, as "
                "in {'pp': [1, 2], 'dp': -1, 'tp': 2}"
            )
        strange = [] if self.memory is None else [axis for axis in self.memory.over if axis not in self.axes]
        if strange:
            raise ConfigError(
                f"reading mesh template {plain(self.axes)}: its memory is divided over axis {strange[0]!r}, expected "
                f"axes of the template; name one of {sorted(self.axes)}"
            )

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`; `from_json` takes it."""
        return {"axes": plain(self.axes), "memory": None if self.memory is None else asdict(self.memory)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Template:
        """What `to_json` made, elsewhere; raises `ConfigError` for what makes no sense."""
        memory = value["memory"]
        known = None if memory is None else Memory(**{**memory, "over": tuple(memory["over"])})
        return make_template(value["axes"], known)

    def shapes(self, num_workers: int) -> Iterator[dict[str, int]]:
        """Every mesh over at most ``num_workers``, the preferred one first; the free axis is as long as possible."""
        for sizes in itertools.product(*self.axes.values()):
            fixed = math.prod(size for size in sizes if size != FREE)
            if fixed <= num_workers:
                free = num_workers // fixed
                yield {axis: free if size == FREE else size for axis, size in zip(self.axes, sizes, strict=True)}


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


def make_template(axes: Axes, memory: Memory | None = None) -> Template:
    """The template for these axes; raises `ConfigError` if they contradict each other."""
    if not isinstance(axes, Mapping) or not all(isinstance(axis, str) for axis in axes):
        raise ConfigError(
            f"reading mesh template {axes!r}: expected sizes by the names of axes, found {type(axes).__name__}; name "
            "each axis, as in {'pp': [1, 2], 'dp': -1, 'tp': 2}"
        )
    return Template({axis: (size,) if _is_size(size) else _listed(size) for axis, size in axes.items()}, memory)


def decide_mesh(template: Template, num_workers: int) -> MeshChoice | str:
    """The best mesh of this template over ``num_workers``, or the reason why none fits."""
    memory = template.memory
    too_large: list[tuple[int, dict[str, int]]] = []
    best: dict[str, int] | None = None
    for axes in template.shapes(num_workers):
        if memory is not None and memory.needed_bytes(axes) > memory.limit_bytes:
            too_large.append((memory.needed_bytes(axes), axes))
        elif best is None or math.prod(axes.values()) > math.prod(best.values()):
            best = axes
    if best is None and too_large and memory is not None:
        needed, axes = min(too_large, key=lambda each: each[0])
        return (
            f"no mesh of {format_axes(template.axes)} over {num_workers} workers fits into {memory.limit_bytes} bytes "
            f"of a worker; {format_axes(axes)} needs the least memory, {needed} bytes"
        )
    if best is None:
        fewest = min(math.prod(max(size, 1) for size in sizes) for sizes in itertools.product(*template.axes.values()))
        return f"mesh {format_axes(template.axes)} needs at least {fewest} workers, {num_workers} are alive"
    standby = num_workers - math.prod(best.values())
    reason = f"{num_workers} workers fit {format_axes(best)}"
    if standby:
        reason += f", {standby} stand by"
    larger = [axes for _, axes in too_large if math.prod(axes.values()) >= math.prod(best.values())]
    if larger:
        reason += f"; {format_axes(larger[0])} would not fit into a worker's memory"
    return MeshChoice(best, standby, reason)


def format_axes(axes: Axes) -> str:
    """``dp=2 x tp=2``; a free axis shows as ``dp=any``, one to choose for as ``pp=1|2|4``."""
    return " x ".join(f"{axis}={'|'.join(_shown(size) for size in _listed(sizes))}" for axis, sizes in axes.items())


def plain(axes: Axes) -> dict[str, int | list[int]]:
    """The axes as a user writes them: a number where there is nothing to choose."""
    return {axis: each[0] if len(each := _listed(sizes)) == 1 else list(each) for axis, sizes in axes.items()}


def _listed(sizes: Any) -> tuple[Any, ...]:
    return tuple(sizes) if isinstance(sizes, Sequence) and not isinstance(sizes, str) else (sizes,)


def _shown(size: Any) -> str:
    return "any" if size == FREE else str(size)


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and (size >= 1 or size == FREE)
