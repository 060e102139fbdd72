"""Which pages does an image of a frozen process hold? Found in two looks, so that writing can begin after the first.

1. Anonymous memory: pages that were written since they were marked, or all of it for a full image and where there are
   no marks. They are the image's own, whatever the second look finds. With marks this costs what was written.
2. While those are written: pages of mapped files, of which a program may have hundreds and has changed little, and all
   anonymous pages that are there, as far as they decide what of older images can be seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from remesh.transparent.images.increment import Split, split_pages
from remesh.transparent.images.layers import Layer
from remesh.transparent.images.memory import PageMap
from remesh.transparent.images.proc_text import Area, AreaKind
from remesh.transparent.images.ranges import PageSet


class Scan:
    """The pages of a frozen process; the first look is taken when this is made."""

    def __init__(self, pages: PageMap, areas: Sequence[Area], previous: Sequence[Layer] | None) -> None:
        """``previous`` has the layers of the image that the marks are relative to; None for a full image."""
        self._pages, self._previous = pages, previous
        self._anonymous = [area for area in areas if area.kind is AreaKind.ANONYMOUS]
        self._others = [area for area in areas if area.kind is not AreaKind.ANONYMOUS]
        self._written = [None if previous is None else pages.written(area) for area in self._anonymous]
        known = zip(self._anonymous, self._written, strict=True)
        self._first = [pages.saved(area) if written is None else written for area, written in known]
        self.first = PageSet.chain(self._first)
        """Pages that the image holds itself in any case."""

    def split(self) -> Split:
        """The second look: all pages of the image."""
        of_files = PageSet.chain(map(self._pages.saved, self._others))
        known = zip(self._anonymous, self._written, self._first, strict=True)
        saved = [first if written is None else self._pages.saved(area) for area, written, first in known]
        return split_pages(self.first, PageSet.chain(saved), self._previous or ()).and_own(of_files)
