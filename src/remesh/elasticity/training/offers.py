"""State that one rank can give to fill a mesh: its own memory, and snapshots on its node."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from remesh.elasticity.training_state import HeldState, Moment
from remesh.layout.from_torch import Piece, join_if_alike, join_pieces


@dataclass(frozen=True, slots=True)
class Offers:
    """The state that one rank can give."""

    held: HeldState | None
    """The state in its own memory, if it belongs to a step."""
    snapshots: tuple[HeldState, ...] = ()
    """Snapshots in its node's memory, its own and others'."""

    def holds(self, moment: Moment) -> bool:
        """Whether the state in its own memory is of this moment, or a later one of its step."""
        return self.held is not None and self.held.moment.has(moment)

    def at(self, moment: Moment, names: Collection[str] | None = None) -> dict[str, Piece]:
        """Everything of this moment, by tensor; of these tensors alone, if any are named."""
        found = self._found(moment)
        return {name: join_pieces(pieces) for name, pieces in found.items() if names is None or name in names}

    def boxes_at(self, moment: Moment) -> dict[str, Piece]:
        """The same to be described only: their tensors are not there as one."""
        return {
            name: replace(pieces[0], shards=tuple({s.box: s for one in pieces for s in one.shards}.values()))
            for name, pieces in self._found(moment).items()
        }

    def _found(self, moment: Moment) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for one in (self.held, *self.snapshots):
            if one is not None and one.moment.has(moment):
                for name, piece in one.pieces.items():
                    found.setdefault(name, []).append(piece)
        return found


def keep_both(before: Mapping[str, Piece], filled: Mapping[str, Piece]) -> dict[str, Piece]:
    """What a rank held and what it was filled with: others may have given up either."""
    both = dict(before) | dict(filled)
    for name in before.keys() & filled.keys():
        old, new = before[name], filled[name]
        if not {shard.box for shard in old.shards} <= {shard.box for shard in new.shards}:
            both[name] = join_if_alike(old, new)
    return both
