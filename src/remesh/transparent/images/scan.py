"""Which pages does an image of a frozen process hold? Found in two looks, so that writing can begin after the first.

1. Pages that were written since they were marked, and all pages of areas that have no marks: the image's own, whatever
   the second look finds. This costs what was written.
2. All pages that are there: what of older images can still be seen. This costs what there is, while the own pages are
   written.
"""

from __future__ import annotations

from collections.abc import Sequence

from remesh.transparent.images.increment import Split, split_pages, whole
from remesh.transparent.images.layers import Layer
from remesh.transparent.images.memory import PageMap
from remesh.transparent.images.proc_text import Area
from remesh.transparent.images.ranges import PageSet


class Scan:
    """The pages of a frozen process; the first look is taken when this is made."""

    def __init__(self, pages: PageMap, areas: Sequence[Area], previous: Sequence[Layer] | None) -> None:
        """``previous`` has the layers of the image that the marks are relative to; None for a full image."""
        self._pages, self._areas, self._previous = pages, areas, previous
        self._written = [None if previous is None else pages.written(area) for area in areas]
        known = zip(areas, self._written, strict=True)
        self._first = [pages.saved(area) if written is None else written for area, written in known]
        self.first = PageSet.chain(self._first)
        """Pages that the image holds itself in any case."""

    def split(self) -> Split:
        """The second look: all pages of the image."""
        if self._previous is None:
            return whole(self.first)
        known = zip(self._areas, self._written, self._first, strict=True)
        saved = [first if written is None else self._pages.saved(area) for area, written, first in known]
        return split_pages(self.first, PageSet.chain(saved), self._previous)
