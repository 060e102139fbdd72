"""What stands on a page runs as it stands there: every code block and every command line of README and docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.pages.blocks import commands_of, pages
from tests.procs.pages.runner import run

_COSTLY = {"docs/elastic/index.md"}
"""Their commands start jobs whose agents load modules by themselves."""
RUNNABLE = [
    pytest.param(page, marks=[pytest.mark.slow] if page in _COSTLY else [])
    for page in pages()
    if any(not command.left_out for command in commands_of(page))
]


@pytest.mark.procs
@pytest.mark.parametrize("page", RUNNABLE)
def test_a_page_can_be_followed_from_its_top(page: str, tmp_path: Path) -> None:
    for command in commands_of(page):
        if not command.left_out:
            printed = run(command, tmp_path)
            if command.prints is not None:
                assert printed == command.prints, f"{command.place}: {' '.join(command.words)}"


@pytest.mark.netns
def test_programs_that_need_root_run_as_root(tmp_path: Path) -> None:
    programs = [one for page in pages() for one in commands_of(page) if one.program and one.left_out == "needs root"]
    assert programs
    for program in programs:
        run(program, tmp_path)
