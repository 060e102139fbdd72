"""The page of measurements has every row of the report, under the heading where it belongs."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.checkpoint.tables import make_page
from benchmarks.report import Row, at_least, at_most, describe_run


@pytest.mark.procs
def test_every_row_stands_once_under_its_heading() -> None:
    rows = [
        at_least("4 tensors of 4 KiB: load, DCP over ours", 21.4, "ratio", 20.0),
        at_most("an eighth of the columns of 64 MiB: bytes read over wanted", 1.5, "ratio", 1.1),
        Row("256 MiB in the background by a thread: blocked", 0.0052, "s"),
        Row("256 MiB: save with SHA-256 over save", 1.5, "ratio"),
        at_most("256 MiB: convert to zarr, peak extra memory", float(3 << 20), "bytes", float(4 << 20)),
        Row("8 ranks, 20 tensors each: of that, validated", 2.5, "s"),
    ]
    page = make_page({**describe_run(None), "rows": [asdict(row) for row in rows]})
    headings = {}
    for part in page.split("\n## ")[1:]:
        title, *lines = part.split("\n")
        headings |= {line: title for line in lines if line.startswith("| ") and line != "| case | value | goal |"}
    assert headings == {
        "| 4 tensors of 4 KiB: load, DCP over ours | 21.4 | 20, reached |": "Saving and loading",
        "| an eighth of the columns of 64 MiB: bytes read over wanted | 1.5 | 1.1, **missed** |": "Parts of a chunk",
        "| 256 MiB in the background by a thread: blocked | 5.2 ms |  |": "In the background",
        "| 256 MiB: save with SHA-256 over save | 1.5 |  |": "Sums, checks, conversions",
        "| 256 MiB: convert to zarr, peak extra memory | 3 MiB | 4 MiB, reached |": "Sums, checks, conversions",
        "| 8 ranks, 20 tensors each: of that, validated | 2.5 s |  |": "Planning",
    }
