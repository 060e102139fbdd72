"""Meshes: an n-d array of world ranks with named axes, and the host of each rank.

A mesh carries no process group and no device: it is the value that plans are made from. Its ranks may be
any distinct world ranks in any order; its *mesh ranks* are the row-major positions ``0 .. size-1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.foundation.errors import LayoutError

_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, their sizes, and the rank at each coordinate.

    >>> mesh = Mesh.of({"dp": 2, "tp": 2})
    >>> mesh.coordinate_of(2), mesh.rank_at((1, 1))
    ((1, 0), 3)
    """

    axis_names: tuple[str, ...]
    """One name per axis, outermost (slowest) first. Invariant: distinct, not empty strings."""
    shape: tuple[int, ...]
    """Size of each axis. Invariant: every size >= 1; a mesh without axes has one rank."""
    world_ranks: tuple[int, ...]
    """World rank at each mesh rank, row-major. Invariant: distinct, >= 0, ``prod(shape)`` of them."""
    hosts: tuple[str, ...]
    """Host name at each mesh rank; ranks with equal names share a NIC. Invariant: as many as ranks."""

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.shape):
            raise LayoutError(
                f"making a mesh: {len(self.axis_names)} axis names {self.axis_names} for {len(self.shape)} sizes "
                f"{self.shape}; give each axis one name and one size"
            )
        if len(set(self.axis_names)) != len(self.axis_names) or not all(self.axis_names):
            raise LayoutError(
                f"making a mesh: axis names {self.axis_names}, expected distinct and not empty; rename an axis"
            )
        if any(size < 1 for size in self.shape):
            raise LayoutError(
                f"making a mesh: axes {dict(zip(self.axis_names, self.shape, strict=True))}, expected sizes >= 1; "
                "leave an axis out, or give it size 1"
            )
        if len(self.world_ranks) != self.size or len(self.hosts) != self.size:
            raise LayoutError(
                f"making a mesh: shape {self.shape} has {self.size} places, found {len(self.world_ranks)} ranks and "
                f"{len(self.hosts)} hosts; give exactly one of each per place"
            )
        if len(set(self.world_ranks)) != self.size or min(self.world_ranks) < 0:
            listed = self.world_ranks[:_MAX_LISTED]
            raise LayoutError(
                f"making a mesh: world ranks {listed}..., expected distinct numbers >= 0; give each place its own"
            )

    @classmethod
    def of(
        cls,
        axes: Mapping[str, int],
        world_ranks: Sequence[int] | None = None,
        hosts: Sequence[str] | str = "localhost",
    ) -> Mesh:
        """A mesh from ``{axis: size}``; ranks default to ``0 .. size-1``, one name puts all on one host."""
        size = math.prod(axes.values())
        ranks = range(max(size, 0)) if world_ranks is None else world_ranks
        places = (hosts,) * len(ranks) if isinstance(hosts, str) else hosts
        return cls(tuple(axes), tuple(axes.values()), tuple(ranks), tuple(places))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def coordinate_of(self, world_rank: int) -> tuple[int, ...]:
        """Coordinate of a world rank, one number per axis."""
        rest = self._place_of(world_rank)
        coordinate = []
        for size in reversed(self.shape):
            rest, at = divmod(rest, size)
            coordinate.append(at)
        return tuple(reversed(coordinate))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """World rank at a coordinate."""
        if len(coordinate) != self.ndim or any(
            not 0 <= at < size for at, size in zip(coordinate, self.shape, strict=True)
        ):
            raise LayoutError(
                f"looking up coordinate {tuple(coordinate)}: it lies outside the mesh of shape {self.shape}; give one "
                "number per axis, from 0"
            )
        mesh_rank = 0
        for at, size in zip(coordinate, self.shape, strict=True):
            mesh_rank = mesh_rank * size + at
        return self.world_ranks[mesh_rank]

    def host_of(self, world_rank: int) -> str:
        """Host of a world rank."""
        return self.hosts[self._place_of(world_rank)]

    def _place_of(self, world_rank: int) -> int:
        if world_rank not in self.world_ranks:
            raise LayoutError(
                f"looking up world rank {world_rank}: it is not among the {self.size} ranks of this mesh; give the "
                "rank's number in the job (its world rank)"
            )
        return self.world_ranks.index(world_rank)

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True)) or "1"
