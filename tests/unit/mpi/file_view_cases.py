"""Views of files drawn by chance, and where their data are: one byte at a time."""

from __future__ import annotations

from hypothesis import strategies as st

from remesh.mpi.upper import layouts
from remesh.mpi.upper.file_views import FileView
from remesh.mpi.upper.layouts import Layout


@st.composite
def views(draw: st.DrawFn) -> FileView:
    """With gaps and without, tiles that touch or interlock, and a displacement."""
    etype_bytes = draw(st.integers(1, 3))
    blocks, at = [], draw(st.integers(0, 2))
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=4)):
        blocks.append((at + gap, count * etype_bytes))
        at += gap + count * etype_bytes
    tile = Layout(layouts.joined(blocks), 0, at + draw(st.integers(0, 4)))
    return FileView(draw(st.integers(0, 5)), etype_bytes, tile)


def positions(view: FileView, num: int) -> list[int]:
    """Where the first data bytes of a view are in the file: the dumb way."""
    found: list[int] = []
    tile = 0
    while len(found) < num:
        for offset, length in view.filetype.segments:
            start = view.displacement + tile * view.filetype.extent + offset
            found.extend(range(start, start + length))
        tile += 1
    return found[:num]
