"""Programs on pages that need the package of a host run as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.pages.blocks import Command, commands_of, pages
from tests.procs.pages.runner import run

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_PROGRAMS = [one for page in pages() for one in commands_of(page) if one.is_run_with_hosts]


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda one: one.place)
def test_a_program_on_a_page_runs_as_it_stands_there(program: Command, tmp_path: Path) -> None:
    run(program, tmp_path)
