"""Difference of a box and many others, as disjoint boxes.

Algorithm. In the first dim where some box to take away does not span the whole, cut at all their corners into
strips; inside a strip every remaining box spans that dim, so the same question is asked about the next dim.
A strip that some box covers ends at once, one that none touches is left whole. Neighbouring strips with equal
remains are joined again, so that regular holes come out as few boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from remesh.layout.box import Box


def subtract_all(box: Box, others: Iterable[Box]) -> tuple[Box, ...]:
    """The elements of ``box`` that are in none of ``others``, as disjoint boxes in row-major order of start.

    >>> subtract_all(Box((0,), (9,)), [Box((2,), (4,)), Box((7,), (20,))])
    (Box((0,), (2,)), Box((4,), (7,)))
    """
    inside = [shared for other in others if (shared := box.intersect(other)) is not None]
    if box.is_empty:
        return ()
    return tuple(sorted(_remains(box, inside, 0)))


def _remains(box: Box, inside: list[Box], dim: int) -> list[Box]:
    if not inside:
        return [box]
    while dim < box.ndim and all(b.start[dim] == box.start[dim] and b.stop[dim] == box.stop[dim] for b in inside):
        dim += 1
    if dim == box.ndim:
        return []
    cuts = sorted({box.start[dim], box.stop[dim], *(b.start[dim] for b in inside), *(b.stop[dim] for b in inside)})
    members: list[list[Box]] = [[] for _ in cuts]
    place = {cut: index for index, cut in enumerate(cuts)}
    for each in inside:
        for index in range(place[each.start[dim]], place[each.stop[dim]]):
            members[index].append(each.with_interval(dim, cuts[index], cuts[index + 1]))
    done: list[Box] = []
    strip: list[Box] = []
    for index, (low, high) in enumerate(itertools.pairwise(cuts)):
        found = _remains(box.with_interval(dim, low, high), members[index], dim + 1)
        grown = [b.with_interval(dim, a.start[dim], high) for a, b in zip(strip, found, strict=False)]
        if len(found) == len(strip) and all(_differ_only_in(a, b, dim) for a, b in zip(strip, found, strict=True)):
            strip = grown
        else:
            done += strip
            strip = found
    return done + strip


def _differ_only_in(a: Box, b: Box, dim: int) -> bool:
    return a.start[:dim] + a.start[dim + 1 :] == b.start[:dim] + b.start[dim + 1 :] and (
        a.stop[:dim] + a.stop[dim + 1 :] == b.stop[:dim] + b.stop[dim + 1 :]
    )
