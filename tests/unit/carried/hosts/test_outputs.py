"""What a program prints reaches the launcher's streams, from its first byte on and once."""

from __future__ import annotations

import io
from pathlib import Path

from remesh.carried.hosts.outputs import Output, open_outputs


def test_what_is_written_before_anybody_looks_is_shown(tmp_path: Path) -> None:
    out, err = open_outputs(tmp_path, 3)
    shown = out.stream = io.BytesIO()
    with out.path.open("a") as file:
        file.write("first\n")
    out.copy()
    with out.path.open("a") as file:
        file.write("second\n")
    out.copy()
    assert shown.getvalue() == b"first\nsecond\n" and (out.path.name, err.path.name) == (
        "rank-0003.out",
        "rank-0003.err",
    )


def test_what_an_earlier_stay_has_shown_is_not_shown_again_and_what_came_after_its_checkpoint_is_cut(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank-0000.out").write_text("shown\nlost\n")
    out: Output = open_outputs(tmp_path, 0)[0]
    shown = out.stream = io.BytesIO()
    out.cut(6)
    with out.path.open("a") as file:
        file.write("again\n")
    out.copy()
    assert shown.getvalue() == b"again\n" and out.path.read_text() == "shown\nagain\n"
