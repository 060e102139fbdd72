from pathlib import Path

import pytest
from click.testing import CliRunner

from remesh.cli import main
from remesh.cli.run import complete_endpoint, parse_nnodes
from remesh.errors import ConfigError


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("2", (2, 2)), ("1:4", (1, 4)), ("3:", (3, 3))])
def test_numbers_of_nodes_are_read_as_torchrun_reads_them(text: str, nodes: tuple[int, int]) -> None:
    assert parse_nnodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "4:1", ":2", "a", "1:2:3", "-1"])
def test_senseless_numbers_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--nnodes"):
        parse_nnodes(text)


def test_endpoint_gets_torchruns_port_or_a_free_one() -> None:
    assert complete_endpoint("head") == "head:29400"
    assert complete_endpoint("head:1234") == "head:1234"
    host, port = complete_endpoint("").split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_missing_script_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["run", str(tmp_path / "nothing.py")])
    assert result.exit_code == 1
    assert "does not exist" in result.output
    assert "Traceback" not in result.output


def test_endpoint_without_the_name_of_the_job_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    result = CliRunner().invoke(main, ["run", "--rdzv-endpoint", "head:29400", str(script)])
    assert result.exit_code == 1
    assert "--rdzv-id" in result.output


def test_store_that_does_not_answer_is_named_in_bounded_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    flags = ["--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", "x", "--no-rdzv-host", "--join-timeout", "1"]
    result = CliRunner().invoke(main, ["run", *flags, str(script)])
    assert result.exit_code == 1
    assert "no store answers at 127.0.0.1:1" in result.output
