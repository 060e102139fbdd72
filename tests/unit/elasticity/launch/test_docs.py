"""The tables of the guide are what the code says. ``REMESH_WRITE_DOCS=1`` writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

from remesh.elasticity.launch.flags import FLAGS, TORCHRUN_FLAGS, Flag
from remesh.elasticity.model.outcome import Category

GUIDE = Path(__file__).parents[4] / "docs" / "elastic" / "run.md"
_TABLE = re.compile(r"(<!-- flags: .*? -->\n)(.*?)(<!-- /flags -->)", re.DOTALL)


def row(flag: Flag) -> str:
    spelling = f"`-{flag.short}`, " if flag.short else ""
    origin = "torchrun" if flag in TORCHRUN_FLAGS else "ours"
    return f"| {spelling}`--{flag.name}` | {origin} | {', '.join(flag.modes)} | {flag.help.replace('|', '/')} |"


def test_table_of_flags_is_the_codes() -> None:
    table = "\n".join(["| flag | from | modes | meaning |", "|---|---|---|---|", *map(row, FLAGS)]) + "\n"
    text = GUIDE.read_text()
    if os.environ.get("REMESH_WRITE_DOCS"):
        GUIDE.write_text(_TABLE.sub(lambda found: found[1] + table + found[3], text))
    found = _TABLE.search(GUIDE.read_text())
    assert found is not None
    assert found[2] == table, "the guide's table of flags is old; write it anew with REMESH_WRITE_DOCS=1"


def test_every_exit_code_is_in_the_guide() -> None:
    text = GUIDE.read_text()
    for category in Category:
        assert re.search(rf"^\| {category.exit_code} \| {category.value}", text, re.MULTILINE), category
