"""Check that every element of a holder's buffer has memory of its own (no aliasing).

Two elements that share a place cannot both be filled, and of what lies there only one can be right. So a buffer whose
boxes meet in memory is refused before anything is read or written.

Definitions. The *place* of an element is its offset in the buffer (`Shard`). The *reach* of a shard is one past its
last place. Two shards that put the same elements at the same places (as a box that is part of another) share
elements, not only places; that is allowed.

Algorithm. Nothing here looks at single elements:

1. A shard alone: by ascending stride each dim must step over all that the dims before it reach.
2. Shards by offset: where each begins behind the reach of all before it, no two meet. This is nearly always so.
3. Others interleave, such as columns of one matrix. Their strides, descending, are the radices of a number system: a
   place is a row of digits, a shard is a box of digits, and boxes that share elements are found as always
   (`box_array`).
4. Where strides do not divide each other, or a digit carries, places are listed, up to a limit; beyond it the shards
   are refused, since they cannot be proved distinct.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from remesh.foundation.errors import LayoutError
from remesh.layout.box import row_major_strides
from remesh.layout.box_array import BoxArray, IntArray, find_pairs
from remesh.layout.shard import Shard

_MOST_LISTED = 1 << 20
"""Places that are listed where strides are no help."""


def check_places(
    shards: Sequence[Shard], global_shape: Sequence[int], doing: str, num_elements: int | None = None
) -> None:
    """Raise `LayoutError` unless the boxes of one buffer lie in the tensor, and every element has its own place.

    ``doing`` is the first part of the message, such as ``"resharding tensor 'w' on rank 3"``; ``num_elements`` is the
    size of the buffer, inside which all places must be, if that is known.

    >>> from remesh.layout import Box
    >>> twice = [Shard(0, Box((0,), (2,))), Shard(0, Box((2,), (4,)))]
    >>> check_places(twice, (4,), "giving 'w'")
    Traceback (most recent call last):
        ...
    remesh.foundation.errors.LayoutError: giving 'w': boxes [0:2] and [2:4] overlap in memory from offset 0 on, ...
    """
    kept = [shard for shard in shards if not shard.box.is_empty]
    for shard in kept:
        if min(shard.box.start, default=0) < 0 or any(
            end > size for end, size in zip(shard.box.stop, global_shape, strict=True)
        ):
            raise LayoutError(
                f"{doing}: box {shard.box} reaches outside the global shape {tuple(global_shape)}, expected boxes "
                "inside it; correct the box or the shape"
            )
        assert shard.strides is not None
        if not has_own_places(shard.box.shape, shard.strides):
            raise LayoutError(
                f"{doing}: elements of box {shard.box} overlap in memory, with strides {shard.strides} for shape "
                f"{shard.box.shape}, expected distinct memory for each; make the tensor contiguous, or correct the "
                "strides"
            )
        if num_elements is not None and _reach(shard) > num_elements:
            raise LayoutError(
                f"{doing}: box {shard.box} reaches to element {_reach(shard)} of a local tensor that has "
                f"{num_elements}; correct the offset and strides of the piece"
            )
    clash = _find_clash(kept) if len(kept) > 1 else None
    if clash is not None:
        first, other = (kept[at] for at in clash)
        raise LayoutError(
            f"{doing}: boxes {first.box} and {other.box} overlap in memory from offset "
            f"{max(first.offset, other.offset)} "
            "on, expected distinct memory for each element; correct the offsets and strides"
        )


@lru_cache(maxsize=4096)
def has_own_places(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether every element of a strided array has a place of its own.

    >>> has_own_places((4, 2), (2, 1)), has_own_places((4, 2), (0, 1))
    (True, False)
    """
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                return stride > 0 and math.prod(shape) <= _MOST_LISTED and _are_distinct(_places(0, shape, strides))
            reach += (size - 1) * stride
    return True


def _find_clash(shards: Sequence[Shard]) -> tuple[int, int] | None:
    """Two shards that share places, though not the elements there; None without."""
    order = sorted(range(len(shards)), key=lambda at: shards[at].offset)
    reach, cluster = 0, [order[0]]
    for at in order:
        if shards[at].offset < reach:
            cluster.append(at)
        else:
            clash = _clash_among(shards, cluster) if len(cluster) > 1 else None
            if clash is not None:
                return clash
            cluster = [at]
        reach = max(reach, _reach(shards[at]))
    return _clash_among(shards, cluster) if len(cluster) > 1 else None


def _clash_among(shards: Sequence[Shard], cluster: Sequence[int]) -> tuple[int, int] | None:
    boxes = _digit_boxes([shards[at] for at in cluster])
    if boxes is None:
        return _clash_by_listing(shards, cluster)
    for a, b in zip(*(each.tolist() for each in find_pairs(boxes, boxes)), strict=True):
        one, other = cluster[a], cluster[b]
        if a < b and not _say_the_same(shards[one], shards[other], boxes, (a, b)):
            clash = _clash_by_listing(shards, (one, other))
            if clash is not None:
                return clash
    return None


def _digit_boxes(shards: Sequence[Shard]) -> BoxArray | None:
    """Each shard as a box of digits; None where strides do not divide each other, or a digit carries."""
    steps = [[(s, n) for s, n in zip(_strides(shard), shard.box.shape, strict=True) if n > 1] for shard in shards]
    radices = sorted({1, *(stride for each in steps for stride, _ in each)}, reverse=True)
    if any(large % small for large, small in itertools.pairwise(radices)):
        return None
    sizes = np.array([[dict(each).get(radix, 1) for radix in radices] for each in steps], dtype=np.int64)
    rest = np.array([shard.offset for shard in shards], dtype=np.int64)
    starts = np.empty_like(sizes)
    for column, radix in enumerate(radices):
        starts[:, column], rest = np.divmod(rest, radix)
    room = [large // small for large, small in itertools.pairwise(radices)]
    if (starts[:, 1:] + sizes[:, 1:] > np.array(room, dtype=np.int64)).any():
        return None
    return BoxArray(starts, starts + sizes)


def _say_the_same(one: Shard, other: Shard, places: BoxArray, rows: tuple[int, int]) -> bool:
    """Whether two shards mean the same elements wherever they share places."""
    shared = one.box.intersect(other.box)
    if shared is None or one.addend != other.addend or one.offset_of(shared) != other.offset_of(shared):
        return False
    a, b = rows
    common = np.minimum(places.stops[a], places.stops[b]) - np.maximum(places.starts[a], places.starts[b])
    strides = zip(_strides(one), _strides(other), shared.shape, strict=True)
    return shared.size == math.prod(common.tolist()) and all(s == t or n == 1 for s, t, n in strides)


def _clash_by_listing(shards: Sequence[Shard], cluster: Sequence[int]) -> tuple[int, int] | None:
    if sum(shards[at].box.size for at in cluster) > _MOST_LISTED:
        return cluster[0], cluster[1]
    bounds = tuple(np.max([shards[at].box.stop for at in cluster], axis=0).tolist())
    rows = row_major_strides((2, *bounds))[1:]
    places, elements, owners = [], [], []
    for at in cluster:
        box, addend = shards[at].box, shards[at].addend
        first = addend * math.prod(bounds) + sum(x * row for x, row in zip(box.start, rows, strict=True))
        places.append(_places(shards[at].offset, box.shape, _strides(shards[at])))
        elements.append(_places(first, box.shape, rows))
        owners.append(np.full(box.size, at))
    place, element, owner = (np.concatenate(each) for each in (places, elements, owners))
    order = np.argsort(place, kind="stable")
    place, element, owner = place[order], element[order], owner[order]
    wrong = np.flatnonzero((place[1:] == place[:-1]) & (element[1:] != element[:-1]))
    return (int(owner[wrong[0]]), int(owner[wrong[0] + 1])) if len(wrong) else None


def _are_distinct(places: IntArray) -> bool:
    return len(np.unique(places)) == len(places)


def _places(offset: int, shape: Sequence[int], strides: Sequence[int]) -> IntArray:
    """Every place of a strided array, row-major."""
    places = np.array([offset], dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return places


def _reach(shard: Shard) -> int:
    return 1 + shard.offset + sum((n - 1) * s for n, s in zip(shard.box.shape, _strides(shard), strict=True))


def _strides(shard: Shard) -> tuple[int, ...]:
    assert shard.strides is not None
    return shard.strides
