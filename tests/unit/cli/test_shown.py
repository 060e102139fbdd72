"""Texts out of files are shown as they are: never markup, never obeyed by a terminal, never cut in a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh.checkpoint.plan.step_names import step_name
from remesh.cli import main, shown
from remesh.cli.ckpt import FORMATS
from remesh.dashboard.story import Story
from remesh.dashboard.terminal import render

_HOSTILE = ("layers.0[/x]", "experts[w1]", "a[red]b", "evil\x1b[31mred", "two\nok: 0 files", "back\x08\u202etxt")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    values = {f"note {name}": f"[bold]{name}" for name in _HOSTILE}
    remesh.save({**{name: torch.ones(2) for name in _HOSTILE}, **values}, tmp_path / step_name(1))
    return tmp_path / step_name(1)


def _printed(*line: object) -> str:
    done = CliRunner().invoke(main, [*map(str, line)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_names_and_values_out_of_a_checkpoint_are_no_markup_and_move_no_cursor(stored: Path) -> None:
    text = _printed("ckpt", "show", stored, "--cut")
    for name in _HOSTILE:
        assert name.encode("unicode_escape").decode() in text
    assert "\x1b" not in text and "\x08" not in text and "\u202e" not in text
    assert not any(line.startswith("ok: 0 files") for line in text.splitlines())


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_tensor_of_any_name_is_shown(stored: Path, name: str) -> None:
    assert _printed("ckpt", "show", stored, name).startswith(name.encode("unicode_escape").decode())


def test_an_error_that_quotes_a_name_moves_no_cursor(stored: Path) -> None:
    done = CliRunner().invoke(main, ["ckpt", "show", str(stored), "no\x1b[2Jne"])
    assert done.exit_code == 2 and "\x1b" not in done.output


def test_what_programs_read_is_not_touched(stored: Path) -> None:
    names = [one["name"] for one in json.loads(_printed("ckpt", "show", stored, "--json"))["tensors"]]
    assert sorted(names) == sorted(_HOSTILE)


def test_the_screen_of_a_job_shows_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    shown.console().print(render(Story(), "jobs/a[b]\x1b[31m"))
    screen = capsys.readouterr().out
    assert "jobs/a[b]\\x1b[31m" in screen and "\x1b" not in screen


def test_a_table_in_a_pipe_is_as_wide_as_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    shown.print_table(("host", "n"), [("h" * 300, "1")], right=("n",))
    assert "h" * 300 in capsys.readouterr().out


def test_formats_on_the_command_line_are_those_of_the_library() -> None:
    from remesh.checkpoint.run.conversion import Format  # noqa: PLC0415  loads torch

    assert [one.value for one in Format] == [*FORMATS]


def test_the_folder_of_a_run_of_megatron_leads_to_its_newest_iteration(tmp_path: Path) -> None:
    for name in ("iter_0000010", "iter_0000002"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    done = CliRunner().invoke(main, ["ckpt", "show", str(tmp_path)])
    assert f"the newest is {tmp_path}/iter_0000010" in done.output
