"""Of two jobs that save into one directory one checkpoint is there, whole, and the other job is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.forked_programs import run_program

_SCRIPT = Path(__file__).parents[1] / "scripts" / "two_jobs.py"


@pytest.mark.procs
def test_of_two_jobs_that_save_into_one_directory_one_is_there_and_the_other_is_told(tmp_path: Path) -> None:
    assert "8 trials" in run_program(_SCRIPT, tmp_path, str(tmp_path), "17", "8")
