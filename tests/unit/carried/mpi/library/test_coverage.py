"""The table of what is carried says what the library has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from remesh.carried.mpi.library.coverage import group_functions, make_table
from remesh.carried.mpi.library.generate import entries, read_functions, written

pytestmark = pytest.mark.unit
PAGE = Path(__file__).parents[5] / "docs" / "mpi" / "limits.md"


def test_the_page_has_the_table_that_the_library_gives() -> None:
    assert make_table() in PAGE.read_text(), (
        "put what `python -m remesh.carried.mpi.library.coverage` prints into the page"
    )


def test_every_function_stands_in_one_group_and_refuses_if_the_table_says_so() -> None:
    groups = group_functions()
    named = [name for group in groups for name in (*group.carried, *group.refused)]
    assert sorted(named) == sorted(function.name for function in read_functions())
    # What a program calls is the entry point: its text tells what it does.
    text = entries(read_functions(), written())
    refusing = set(re.findall(r'refuse_call\("(\w+)"\)', text)) - {f"{name}_c" for name in named}
    assert refusing == {name for group in groups for name in group.refused if not name.startswith("MPI_T_")}
