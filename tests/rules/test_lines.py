"""The table of lines counts every file of the source once, by the rooms that the architecture names."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from tests.rules.source_tree import ROOT, modules


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lines", ROOT / ".ci" / "lines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINES = _load_script()


def _rows_of_architecture() -> dict[str, str]:
    """What the table of packages says of each."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return dict(re.findall(r"^\| \[`(\w+)`\]\(\.\./src/remesh/\1\) \| (.*) \|$", text, re.MULTILINE))


def test_each_room_of_the_source_is_in_the_table_of_the_architecture_and_no_other() -> None:
    rows = _rows_of_architecture()
    assert set(rows) == {room.partition("/")[0] for room in LINES.find_rooms()}
    for top, _, inner in (room.partition("/") for room in LINES.find_rooms()):
        assert not inner or f"`{inner}`" in rows[top], f"docs/architecture.md, row {top}: has no {inner}"


def test_the_rooms_together_are_the_source() -> None:
    *rooms, (_, python, c) = LINES.lines_of_rooms()
    assert (sum(row[1] for row in rooms), sum(row[2] for row in rooms)) == (python, c)
    assert python == sum(module.text.count("\n") for module in modules())


def test_the_table_has_a_line_for_each_room(capsys: pytest.CaptureFixture[str]) -> None:
    table = LINES.table()
    with capsys.disabled():
        print(f"\n{table}")
    names = [line[:20].strip() for line in table.splitlines()]
    assert names[0] == "room" and names[-4:] == ["tests", "benchmarks", "examples", "docs, words"]
    assert set(LINES.find_rooms()) < set(names) and len(set(names)) == len(names)
