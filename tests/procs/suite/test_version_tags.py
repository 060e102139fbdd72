"""A version is a tag that looks like one; other tags of a clone change nothing."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

_PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
_AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "tag.gpgSign=false", "-c", "commit.gpgSign=false")


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *_AUTHOR, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.procs
def test_a_tag_that_is_no_version_is_passed_over(tmp_path: Path) -> None:
    _git(tmp_path, "init")
    for tag in ("v0.2.0", "before-lunch"):
        _git(tmp_path, "commit", "--allow-empty", "--message", tag)
        _git(tmp_path, "tag", tag)
    options = tomllib.loads(_PYPROJECT.read_text())["tool"]["hatch"]["version"]["raw-options"]
    described = subprocess.run(
        options["git_describe_command"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert described.startswith("v0.2.0-1-g")
