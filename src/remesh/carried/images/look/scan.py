"""Scan of a frozen process's pages, in two passes, so that writing can begin after the first.

1. Pages of private memory that were written since they were marked, or all of it for a full image and where there are
   no marks. They are the image's own, whatever the second pass finds. With marks this costs what was written.
2. While those are written: all private pages that are there, as far as they decide what of older images can be seen,
   and what is in the arena.
"""

from __future__ import annotations

from collections.abc import Sequence

from remesh.carried.images.form.increment import PageSplit, split_pages
from remesh.carried.images.form.kinds import ARENA_PATH
from remesh.carried.images.form.layers import Layer
from remesh.carried.images.form.ranges import PageSet
from remesh.carried.images.look.pagemap import PageMap, file_pages, private_spans
from remesh.foundation.linux.proc_text import Area


class Scan:
    """The pages of a frozen process; the first look is taken when this is made."""

    def __init__(self, pages: PageMap, areas: Sequence[Area], previous: Sequence[Layer] | None) -> None:
        """Take the first look; ``previous``: layers of the image to which the marks are relative, None without one."""
        self._pages, self._previous = pages, previous
        self._spans = private_spans(areas)
        self._arena = [area for area in areas if area.path == ARENA_PATH]
        self.first = PageSet.chain(map(pages.saved if previous is None else pages.written, self._spans))
        """Pages that the image holds itself in any case."""

    def split(self) -> PageSplit:
        """Take the second look: all pages of the image."""
        saved = self.first if self._previous is None else PageSet.chain(map(self._pages.saved, self._spans))
        of_arena = PageSet.chain(file_pages(self._pages.pid, area) for area in self._arena)
        return split_pages(self.first, saved, self._previous or ()).and_own(of_arena)
