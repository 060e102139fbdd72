"""What does a release say of itself? The section of CHANGELOG.md with its version: ``release_notes.py v0.2.0``.

A version that has no section of its own is refused, so nobody publishes without having written what changed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"


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
        print(notes_of(_CHANGELOG.read_text(), sys.argv[1].removeprefix("v")))
    except ValueError as error:
        sys.exit(f"writing release notes: {error}")
