"""What can one rank give to fill a mesh? The state in its own memory, and snapshots on its node."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from remesh.elasticity.state import HeldState
from remesh.layout.from_torch import Piece, join_if_alike, join_pieces


@dataclass(frozen=True, slots=True)
class Offers:
    """The state that one rank can give."""

    held: HeldState | None
    """The state in its own memory, if it belongs to a step."""
    snapshots: tuple[HeldState, ...] = ()
    """Snapshots in its node's memory, its own and others'."""

    def holds(self, line: int, step: int) -> bool:
        """Whether the state in its own memory is of this step of this line."""
        return self.held is not None and (self.held.line, self.held.step) == (line, step)

    def at(self, line: int, step: int, names: Collection[str] | None = None) -> dict[str, Piece]:
        """Everything of this step of this line, by tensor; of these tensors alone, if any are named."""
        found = self._found(line, step)
        return {name: join_pieces(pieces) for name, pieces in found.items() if names is None or name in names}

    def boxes_at(self, line: int, step: int) -> dict[str, Piece]:
        """The same to be described only: their tensors are not there as one."""
        return {
            name: replace(pieces[0], shards=tuple({s.box: s for one in pieces for s in one.shards}.values()))
            for name, pieces in self._found(line, step).items()
        }

    def _found(self, line: int, step: int) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for one in self._of(line, step):
            for name, piece in one.pieces.items():
                found.setdefault(name, []).append(piece)
        return found

    def _of(self, line: int, step: int) -> Iterator[HeldState]:
        for one in (self.held, *self.snapshots):
            if one is not None and (one.line, one.step) == (line, step):
                yield one


def keep_both(before: Mapping[str, Piece], filled: Mapping[str, Piece]) -> dict[str, Piece]:
    """What a rank held and what it was filled with: others may have given up either."""
    both = dict(before) | dict(filled)
    for name in before.keys() & filled.keys():
        old, new = before[name], filled[name]
        if not {shard.box for shard in old.shards} <= {shard.box for shard in new.shards}:
            both[name] = join_if_alike(old, new)
    return both
