"""Layouts from what each holder states: grid blocks, flat ranges, ragged lengths.

Definitions. A *grid block* is a local tensor at an offset of the global one, possibly with *prepended axes*: leading
global dims that the local tensor lacks, of which it keeps one index each (Megatron Core stacks layers or experts this
way). A *flat range* counts elements of a box flattened row-major; a holder keeps such ranges one after the other in a
buffer (FSDP's flat parameters, Megatron's flattened shards). *Ragged* lengths cut one dim into consecutive pieces, of
the lengths that the holders state.

Nothing here requires that the statements fit together; :meth:`remesh.layout.layout.Layout.check` checks that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from remesh.foundation.errors import LayoutError
from remesh.layout.box import Box
from remesh.layout.flat import boxes_of_flat_range
from remesh.layout.layout import Layout
from remesh.layout.shard import Holder, Shard


@dataclass(frozen=True, slots=True)
class GridBlock:
    """One holder's local tensor and its place."""

    holder: Holder
    global_offset: tuple[int, ...]
    """First global index of the block, prepended axes included."""
    local_shape: tuple[int, ...]
    """Shape of the local tensor, prepended axes not included."""


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A range of a flattened box, and where its holder keeps it."""

    holder: Holder
    start: int
    """First element, counted row-major inside ``box``."""
    stop: int
    """One past the last element. Invariant: ``start <= stop <= box.size``; an empty range keeps nothing."""
    box: Box | None = None
    """The box that was flattened; None is the whole tensor."""
    buffer_start: int = 0
    """Element of the holder's buffer where the range begins. Invariant: >= 0."""


def layout_from_grid(
    global_shape: Sequence[int],
    blocks: Iterable[GridBlock],
    dtype: str,
    *,
    num_prepended: int = 0,
    fragments: Sequence[int] | None = None,
) -> Layout:
    """The layout of blocks of a grid.

    With ``fragments`` (Megatron's ``axis_fragmentations``: number of blocks along each global dim, prepended ones
    included) every block must sit on the regular grid: global size = fragments * block size, offset a multiple of
    the block size. Without, blocks may have any offset and size.

    >>> layout = layout_from_grid((2, 4), [GridBlock(7, (1, 0), (4,))], "int8", num_prepended=1, fragments=(2, 1))
    >>> str(layout.shards[0].box), layout.shards[0].strides
    ('[1:2, 0:4]', (4, 1))
    """
    shape = tuple(global_shape)
    if fragments is not None and len(fragments) != len(shape):
        raise LayoutError(
            f"placing blocks on a grid: {len(fragments)} fragment counts {tuple(fragments)} for global shape {shape}, "
            f"expected {len(shape)}; give one per dim"
        )
    shards = []
    for block in blocks:
        extent = (1,) * num_prepended + tuple(block.local_shape)
        if not len(extent) == len(block.global_offset) == len(shape):
            raise LayoutError(
                f"placing a block of holder {block.holder!r}: {num_prepended} prepended axes and local shape "
                f"{tuple(block.local_shape)} make {len(extent)} dims, the offset {tuple(block.global_offset)} has "
                f"{len(block.global_offset)} and the global shape {shape} has {len(shape)}, expected equal; correct "
                "the offset, the local shape or the number of prepended axes"
            )
        if fragments is not None:
            _check_on_grid(block, extent, shape, fragments)
        shards.append(Shard(block.holder, Box.at(block.global_offset, extent)))
    return Layout(shape, tuple(shards), dtype)


def layout_from_flat_ranges(global_shape: Sequence[int], ranges: Iterable[FlatRange], dtype: str) -> Layout:
    """The layout of ranges of the flattened tensor (or of flattened boxes of it).

    >>> layout = layout_from_flat_ranges((2, 3), [FlatRange(0, 0, 4), FlatRange(1, 4, 6)], "int8")
    >>> [(shard.holder, str(shard.box), shard.offset) for shard in layout.shards]
    [(0, '[0:1, 0:3]', 0), (0, '[1:2, 0:1]', 3), (1, '[1:2, 1:3]', 0)]
    """
    shape = tuple(global_shape)
    shards = []
    for each in ranges:
        offset = each.buffer_start
        box = Box.of_shape(shape) if each.box is None else each.box
        for part in boxes_of_flat_range(box, each.start, each.stop):
            shards.append(Shard(each.holder, part, offset))
            offset += part.size
    return Layout(shape, tuple(shards), dtype)


def layout_from_ragged(global_shape: Sequence[int], dim: int, lengths: Mapping[Holder, int], dtype: str) -> Layout:
    """The layout of consecutive pieces of ``dim``, of the lengths that ``lengths`` has, in the order of the mapping.

    >>> [str(shard.box) for shard in layout_from_ragged((6, 2), 0, {0: 1, 1: 0, 2: 5}, "int8").shards]
    ['[0:1, 0:2]', '[1:1, 0:2]', '[1:6, 0:2]']
    """
    shape = tuple(global_shape)
    if not 0 <= dim < len(shape):
        raise LayoutError(
            f"cutting dim {dim} of global shape {shape} raggedly: expected dim 0 to {len(shape) - 1}; negative dims "
            "are not supported"
        )
    if sum(lengths.values()) != shape[dim] or any(length < 0 for length in lengths.values()):
        raise LayoutError(
            f"cutting dim {dim} of global shape {shape} raggedly: the {len(lengths)} lengths add up to "
            f"{sum(lengths.values())}, expected {shape[dim]} from lengths >= 0; list a length for every part"
        )
    shards = []
    start = 0
    for holder, length in lengths.items():
        shards.append(Shard(holder, Box.of_shape(shape).with_interval(dim, start, start + length)))
        start += length
    return Layout(shape, tuple(shards), dtype)


def _check_on_grid(block: GridBlock, extent: tuple[int, ...], shape: tuple[int, ...], fragments: Sequence[int]) -> None:
    for dim, (offset, length, size, count) in enumerate(
        zip(block.global_offset, extent, shape, fragments, strict=True)
    ):
        if length * count != size:
            raise LayoutError(
                f"placing a block of holder {block.holder!r} on a grid: in dim {dim} {count} fragments of {length} "
                f"make {length * count}, expected {size}; correct the fragment counts, or leave them "
                "out for an uneven grid"
            )
        if length and offset % length:
            raise LayoutError(
                f"placing a block of holder {block.holder!r} on a grid: in dim {dim} offset {offset} is no multiple of "
                f"the block size {length}; correct the offset, or leave out the fragment counts for an uneven grid"
            )
