"""Layers of pages of a chain of images: the topmost that has a page counts.

A *layer* is what one of them holds of the pages that are saved; a page is that of the topmost layer which has it. So
what lies below is taken over as it stands, however scattered the pages are that changed since.
"""

from __future__ import annotations

import array
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from remesh.carried.images.form.ranges import PageSet, subtract

_PAGE_BYTES: Final = 4096


class PageRun(NamedTuple):
    """Neighbouring pages whose bytes stand together."""

    start: int  # address, multiple of the page size
    num_pages: int  # at least 1
    source: int  # 0: this image; k: the k-th image it builds upon
    raw_offset: int  # of the first page in the pages of its source

    @classmethod
    def between(cls, start: int, end: int, source: int, raw_offset: int) -> Self:
        """The run of the addresses ``[start, end)``."""
        return cls(start, (end - start) // _PAGE_BYTES, source, raw_offset)

    @property
    def end(self) -> int:
        return self.start + self.num_pages * _PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        return self.num_pages * _PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Layer:
    """Pages and where their bytes are: those of ``pages`` range ``i`` at ``raw_offsets[i]`` of one image's pages."""

    pages: PageSet
    raw_offsets: array.array[int]


def own_layer(*parts: PageSet) -> Layer:
    """The layer of disjoint sets of pages whose bytes stand one behind the other."""
    pages = PageSet.chain(parts)
    offsets = pages.offsets()[:-1]
    if all(map(operator.lt, pages.starts, pages.starts[1:])):
        return Layer(pages, offsets)
    order = sorted(range(len(pages)), key=pages.starts.__getitem__)
    starts, ends, offsets = (
        array.array("Q", map(column.__getitem__, order)) for column in (pages.starts, pages.ends, offsets)
    )
    return Layer(PageSet(starts, ends), offsets)


def layer_within(layer: Layer, wanted: PageSet) -> Layer:
    """The part of a layer with the wanted pages; no run of it reaches over two ranges of those."""
    pages, offsets = PageSet(array.array("Q"), array.array("Q")), array.array("Q")
    for start, end in wanted:
        first, last = layer.pages.touching(start, end)
        if first == last:
            continue
        at = len(pages)
        pages.starts.extend(layer.pages.starts[first:last])
        pages.ends.extend(layer.pages.ends[first:last])
        offsets.extend(layer.raw_offsets[first:last])
        missing = max(start - pages.starts[at], 0)
        pages.starts[at] += missing
        offsets[at] += missing
        pages.ends[-1] = min(pages.ends[-1], end)
    return Layer(pages, offsets)


def visible_runs(layers: Sequence[Layer]) -> list[PageRun]:
    """The runs of pages that can be seen, by address; ``layers[k]`` is that of source ``k``, the topmost first."""
    runs: list[PageRun] = []
    for source, layer in enumerate(layers):
        above = PageSet.of((run.start, run.end) for run in runs)
        part = layer_within(layer, PageSet.of(subtract(layer.pages, above))) if runs else layer
        found = map(PageRun.between, part.pages.starts, part.pages.ends, [source] * len(part.pages), part.raw_offsets)
        runs = sorted([*runs, *found], key=lambda run: run.start)
    return runs
