"""What a release is made with: notes from the changelog, verbs that exist, Pythons that are tried, a licence."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from remesh import __version__

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_CHANGELOG = """# Changelog

## Unreleased

## 0.2.0 (2026-12-01)

### Added
- A thing.

## 0.1.0

- The first.
"""


def test_release_notes_are_the_section_of_the_version() -> None:
    notes_of = _script("release_notes").notes_of
    assert notes_of(_CHANGELOG, "0.2.0") == "### Added\n- A thing."
    assert notes_of(_CHANGELOG, "0.1.0") == "- The first."


@pytest.mark.parametrize("version", ["0.3.0", "0.2", "Unreleased"])
def test_a_version_that_nobody_wrote_about_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=f"no section '## {version}'"):
        _script("release_notes").notes_of(_CHANGELOG, version)


def test_a_tag_that_is_not_the_version_is_refused() -> None:
    check_tag = _script("release_notes").check_tag
    check_tag("v0.2.0", "0.2.0")
    with pytest.raises(ValueError, match=r"the tag is v0\.2\.1, and the package says 0\.2\.0"):
        check_tag("v0.2.1", "0.2.0")


def test_the_changelog_has_a_section_for_this_version() -> None:
    scripts = _script("release_notes")
    assert scripts.version_of((_ROOT / "src" / "remesh" / "version.py").read_text()) == __version__
    assert scripts.notes_of((_ROOT / "CHANGELOG.md").read_text(), __version__)


def test_what_the_forge_runs_are_verbs_of_the_makefile() -> None:
    verbs = set(re.findall(r"^([a-z-]+):.*## ", (_ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(path.read_text() for path in (_ROOT / ".github" / "workflows").iterdir())
    called = set(re.findall(r"make ([a-z-]+)", commands + (_ROOT / ".ci" / "run").read_text()))
    assert called and called <= verbs | {"test"}, sorted(called - verbs)


def test_the_forge_tries_every_python_that_the_package_names() -> None:
    named = {line.rpartition(" ")[2] for line in _PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    tried = set(re.findall(r'python: "(3\.\d+)"', (_ROOT / ".github" / "workflows" / "ci.yml").read_text()))
    assert tried == named


def test_the_package_says_who_made_it_and_under_which_licence() -> None:
    assert _PROJECT["license"] == "Apache-2.0" and _PROJECT["authors"] == [{"name": "The Remesh developers"}]
    assert "Apache License" in (_ROOT / "LICENSE").read_text()
