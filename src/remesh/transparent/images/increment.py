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


def split_pages(saved: list[PageRange], written: list[PageRange], previous: list[PageRun]) -> Split:
    """Split the pages to be saved; each list is in order and disjoint.

    A page that is neither written nor in the previous image becomes one of the increment's own.
    """
    unwritten = subtract(saved, written)
    inherited = _cut(unwritten, previous)
    covered = [PageRange(run.start, run.end) for run in inherited]
    return Split(subtract(saved, covered), inherited)


def _cut(wanted: list[PageRange], runs: list[PageRun]) -> list[PageRun]:
    """The parts of ``runs`` that are wanted."""
    result, j = [], 0
    for item in wanted:
        while j < len(runs) and runs[j].end <= item.start:
            j += 1
        k = j
        while k < len(runs) and runs[k].start < item.end:
            start, end = max(item.start, runs[k].start), min(item.end, runs[k].end)
            offset = runs[k].raw_offset + start - runs[k].start
            result.append(PageRun(start, (end - start) // _PAGE_BYTES, runs[k].source, offset))
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
