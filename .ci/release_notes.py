"""Notes of a release: the section of CHANGELOG.md with its version, as in ``release_notes.py v0.2.0``.

A tag that is not the version of this tree is refused, and so is a version without a section: nobody publishes a package
that says another version, or a change that nobody has written down.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)


def version_of(source: str) -> str:
    """The version that the text of ``version.py`` gives."""
    (version,) = _VERSION.findall(source)
    return str(version)


def check_tag(tag: str, version: str) -> None:
    """ValueError where a tag does not name this version, as ``v0.2.0`` names 0.2.0."""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and the package says {version}; change one of them")


def notes_of(changelog: str, version: str) -> str:
    """The text below ``## <version>``, which may be followed by a date; ValueError where there is none."""
    found = re.search(
        rf"^## \[?{re.escape(version)}\]?(?: [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE
    )
    if found is None or not found.group(1).strip():
        raise ValueError(f"CHANGELOG.md has no section '## {version}'; turn '## Unreleased' into it")
    return found.group(1).strip()


if __name__ == "__main__":
    try:
        _version = version_of((_ROOT / "src" / "remesh" / "version.py").read_text())
        check_tag(sys.argv[1], _version)
        print(notes_of((_ROOT / "CHANGELOG.md").read_text(), _version))
    except ValueError as error:
        sys.exit(f"writing release notes: {error}")
