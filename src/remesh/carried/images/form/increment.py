"""Pages of an incremental image: those that it writes itself, and the layers of older ones. Pure.

The pages written since the previous image are the increment's own, and its topmost layer; below lie those of the
previous image, without the pages that are not there any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remesh.carried.images.form.format import Ancestor
from remesh.carried.images.form.layers import Layer, layer_within
from remesh.carried.images.form.ranges import PageRange, PageSet, subtract


@dataclass(frozen=True, slots=True)
class PageSplit:
    """The pages of an image: its own, and the inherited layers."""

    own: tuple[PageSet, ...]  # to be written by it, in this order
    inherited: list[Layer]  # of older images, the newest first
    num_bytes: int  # of all its pages, own and inherited

    def and_own(self, pages: PageSet) -> PageSplit:
        """Add pages of its own that lie elsewhere."""
        return PageSplit((*self.own, pages), self.inherited, self.num_bytes + pages.num_bytes)


def split_pages(written: PageSet, saved: PageSet, previous: Sequence[Layer]) -> PageSplit:
    """Split the pages to be saved, by whether they were written since the previous image, whose layers are given.

    ``written`` is a part of ``saved``, and first among the increment's own: those can be written before the others are
    known. A page that is neither written nor in the previous image, which the kernel should not report, follows them.
    Of a full image, which has no previous one, all pages count as written.
    """
    rest: Iterator[PageRange] = iter(saved)
    for layer in sorted(previous, key=lambda layer: len(layer.pages)):
        rest = subtract(rest, layer.pages)
    # The parts are not joined: a run must lie within one area, and areas may touch.
    missed = PageSet.of(subtract(rest, written))
    return PageSplit(
        (written, missed) if missed else (written,),
        [layer_within(layer, saved) for layer in previous],
        saved.num_bytes,
    )


def drop_hidden(split: PageSplit, ancestors: list[Ancestor]) -> tuple[PageSplit, list[Ancestor]]:
    """Drop the layers of which no page can be seen: those images are not needed any more.

    ``ancestors[k]`` is the image that ``split.inherited[k]`` is of.
    """
    above, layers, used = [*split.own], [], []
    for layer, ancestor in zip(split.inherited, ancestors, strict=True):
        seen: Iterator[PageRange] = iter(layer.pages)
        for hiding in above:
            seen = subtract(seen, hiding)
        if next(seen, None) is not None:
            layers.append(layer)
            used.append(ancestor)
        above.append(layer.pages)
    return PageSplit(split.own, layers, split.num_bytes), used
