"""The command line: help costs nothing, an error is one message, an unknown verb is named."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from remesh import __version__
from remesh.cli import group, main
from remesh.foundation.errors import ConfigError


def test_help_lists_every_verb_with_its_line() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for verb, line in group._VERBS.items():
        assert verb in result.output
        assert line.split(".")[0][:40] in result.output


def test_every_verb_loads_and_describes_itself() -> None:
    for verb in group._VERBS:
        result = CliRunner().invoke(main, [verb, "--help"])
        assert result.exit_code == 0, result.output
        assert "Usage:" in result.output


def test_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"remesh, version {__version__}\n"


def test_an_unknown_verb_is_named() -> None:
    result = CliRunner().invoke(main, ["fly"])
    assert result.exit_code == 2
    assert "No such command 'fly'" in result.output


def test_our_errors_are_one_message_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise ConfigError("starting: mesh dp=3 for 4 workers; change one of them")

    monkeypatch.setattr(group.LazyGroup, "get_command", lambda *_: broken)
    result = CliRunner().invoke(main, ["broken"])
    assert result.exit_code == 2
    assert result.output == "Error: starting: mesh dp=3 for 4 workers; change one of them\n"


def test_a_verb_whose_packages_are_missing_says_which_extra_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("remesh.cli.dashboard", "remesh.dashboard.serve"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(main, ["dashboard", "events"])
    assert result.exit_code == 2
    assert "'uvicorn' is not installed" in result.output
    assert "pip install 'remesh[dashboard]'" in result.output


def test_the_screen_needs_no_web_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("remesh.cli.top", "remesh.cli.dashboard", "remesh.dashboard.serve"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(main, ["top", "--once", str(tmp_path)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.shell_completion.BashComplete._check_version", lambda *_: None)
    done = CliRunner().invoke(main, [], prog_name="remesh", env={"_REMESH_COMPLETE": f"{shell}_source"})
    assert done.exit_code == 0 and "_REMESH_COMPLETE" in done.output


@pytest.mark.parametrize(
    ("words", "found"), [("remesh pi", "pipeline"), ("remesh ckpt ver", "verify"), ("remesh plan --compa", "--compare")]
)
def test_verbs_and_options_are_completed(words: str, found: str) -> None:
    number = str(len(words.split()) - 1)
    env = {"_REMESH_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
    assert found in CliRunner().invoke(main, [], prog_name="remesh", env=env).output
