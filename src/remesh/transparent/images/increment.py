"""Which pages does an increment write itself, and where does it find the others? Pure arithmetic on ranges of pages.

A page that is to be saved is *written* (since the previous image, or not tracked), or it stands in the previous image
or in one that that builds upon. The index of an increment is complete: it names, for each run of pages, the folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remesh.transparent.images.format import Ancestor, PageRun
from remesh.transparent.images.ranges import PageRange, subtract

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Split:
    """The pages of an increment."""

    own: list[PageRange]  # to be written by the increment, in order
    inherited: list[PageRun]  # found in older images, in order; sources count as in the previous image


def split_pages(written: list[PageRange], unwritten: list[PageRange], previous: list[PageRun]) -> Split:
    """Split the pages to be saved, by whether they were written since the previous image.

    Each list is in order and disjoint, and so are the first two together. A page that is neither written nor in the
    previous image becomes one of the increment's own.
    """
    inherited = _cut(unwritten, previous)
    if sum(run.num_pages for run in inherited) * _PAGE_BYTES == sum(end - start for start, end in unwritten):
        return Split(written, inherited)
    missed = subtract(unwritten, [PageRange(run.start, run.end) for run in inherited])
    # Not joined: a run must lie within one area, and areas may touch.
    return Split(sorted([*written, *missed]), inherited)


def _cut(wanted: list[PageRange], runs: list[PageRun]) -> list[PageRun]:
    """The parts of ``runs`` that are wanted."""
    result, j = [], 0
    ends = [run.end for run in runs]
    for first, last in wanted:
        while j < len(runs) and ends[j] <= first:
            j += 1
        k = j
        while k < len(runs) and runs[k].start < last:
            at, _, source, offset = runs[k]
            start, end = max(first, at), min(last, ends[k])
            result.append(PageRun(start, (end - start) // _PAGE_BYTES, source, offset + start - at))
            k += 1
    return result


def number_sources(runs: Iterable[PageRun], ancestors: list[Ancestor]) -> tuple[list[PageRun], list[Ancestor]]:
    """The runs with the sources that are still in use numbered from 1, and those sources.

    ``ancestors[s]`` is source ``s`` of ``runs``: the previous image first, then those that it builds upon.
    """
    runs = list(runs)
    used = sorted({run.source for run in runs})
    new = {source: number for number, source in enumerate(used, 1)}
    numbered = [PageRun(run.start, run.num_pages, new[run.source], run.raw_offset) for run in runs]
    return numbered, [ancestors[source] for source in used]
