from pathlib import Path

import pytest
from click.testing import CliRunner

from remesh.cli import main


def test_missing_script_is_one_line_and_an_input_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["run", str(tmp_path / "nothing.py")])
    assert result.exit_code == 2
    assert "does not exist" in result.output
    assert "Traceback" not in result.output


def test_endpoint_without_the_name_of_the_job_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    result = CliRunner().invoke(main, ["run", "--mode", "in-process", "--rdzv-endpoint", "head:29400", str(script)])
    assert result.exit_code == 2
    assert "--rdzv-id" in result.output


@pytest.mark.procs  # it waits
def test_store_that_does_not_answer_is_named_in_bounded_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    flags = ["--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", "x", "--no-rdzv-host", "--join-timeout", "1"]
    result = CliRunner().invoke(main, ["run", "--mode", "in-process", *flags, str(script)])
    assert result.exit_code == 75
    assert "no store answers at 127.0.0.1:1" in result.output
