"""Wrong command lines: each ends with the right code and one message without a traceback, and leaves nothing behind."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh.checkpoint.plan.step_names import step_name
from remesh.cli import main
from remesh.foundation.exit_codes import ExitCode

_SCENARIO = Path(__file__).with_name("wrong_lines.txt")
_LINES = [line.split(" | ", 3) for line in _SCENARIO.read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the lines name."""
    here = tmp_path_factory.mktemp("here")
    for step in (1, 2):
        remesh.save({"w": torch.ones(4, 4) * step, "experts[w1]": torch.ones(2)}, here / "run" / step_name(step))
    (here / "empty").mkdir()
    for name, text in {
        "file.txt": "hello",
        "bad.json": "{",
        "costs.json": '{"stages": [{"name": "a"}]}',
        "train.py": "",
    }.items():
        (here / name).write_text(text)
    return here


def _tree(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name != "tok")


@pytest.mark.parametrize(("code", "judgement", "line", "words"), _LINES, ids=[each[2] for each in _LINES])
def test_a_wrong_line_is_one_message(
    code: str, judgement: str, line: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("remesh.testbed.known_testbeds.find_testbeds", list)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "REMESH_JOBS"):
        monkeypatch.delenv(name, raising=False)
    before = _tree(folder)
    done = CliRunner().invoke(main, shlex.split(line))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == int(code) and done.exit_code in (ExitCode.FAILED, ExitCode.USAGE), done.output
    assert not done.stdout, "errors go to stderr"
    assert words in done.output.replace(f"{folder}/", ""), done.output
    assert judgement.partition(":")[0] in ("good", "fair", "poor")
    assert _tree(folder) == before


def test_they_are_many_and_few_of_their_messages_are_poor() -> None:
    assert len(_LINES) >= 120
    assert sum(judgement.startswith("poor") for _, judgement, *_ in _LINES) <= 2
