"""Which tensors are alike? Those are planned as one.

A model has many tensors of few kinds: each layer repeats the one before. Two tensors are *alike* where their moves have
the same two layouts, object for object, as `remesh.resharding.running.describe` makes them. A *stack* is all tensors
that are alike, as one tensor with a dim more: element ``[i, ...]`` of it is element ``[...]`` of the tensor ``i``, by
name.

A stack says who holds and wants which elements, which is what a plan needs. It has no memory: where the elements of a
tensor lie, its own piece says. So a thousand tensors of ten kinds are planned, checked and compared as ten, and whoever
moves bytes asks `unstack` which tensors a box is of.

Partial sums are left as they are: their whole values have memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remesh.layout import Box, Layout, Shard
from remesh.resharding.model.tasks import TensorMove

Alike = Mapping[str, tuple[str, ...]]
"""For the move of each stack the names of its tensors, of which the first is that of the move. Invariant: two or more,
ascending; a tensor that nothing is like is not in here."""


def stack_moves(moves: Sequence[TensorMove]) -> tuple[list[TensorMove], Alike]:
    """One move for all tensors that are alike, and which those are.

    >>> src, dst = (Layout((4,), (Shard(rank, Box((0,), (4,))),), "int8") for rank in (0, 1))
    >>> stacked, alike = stack_moves([TensorMove("v", src, dst), TensorMove("w", src, dst)])
    >>> stacked[0].src.global_shape, alike
    ((2, 4), {'v': ('v', 'w')})
    """
    same: dict[tuple[int, int], list[TensorMove]] = {}
    single = []
    for move in sorted(moves, key=lambda move: move.name):
        if move.src.partial is None:
            same.setdefault((id(move.src), id(move.dst)), []).append(move)
        else:
            single.append(move)
    stacked, alike = single, {}
    for several in same.values():
        first = several[0]
        if len(several) > 1:
            alike[first.name] = tuple(move.name for move in several)
            first = TensorMove(first.name, _stack(first.src, len(several)), _stack(first.dst, len(several)))
        stacked.append(first)
    return stacked, alike


def _stack(layout: Layout, number: int) -> Layout:
    boxes = [Box((0, *shard.box.start), (number, *shard.box.stop)) for shard in layout.shards]
    shards = tuple(Shard(shard.holder, box) for shard, box in zip(layout.shards, boxes, strict=True))
    return Layout((number, *layout.global_shape), shards, layout.dtype)


def unstack(names: Sequence[str], box: Box) -> tuple[Sequence[str], Box]:
    """The tensors that a box of a stack of these is in, and its box in each; of a single tensor the box itself.

    >>> unstack(["u", "v", "w"], Box((1, 5), (3, 9)))
    (['v', 'w'], Box((5,), (9,)))
    """
    if len(names) == 1:
        return names, box
    return names[box.start[0] : box.stop[0]], Box(box.start[1:], box.stop[1:])
