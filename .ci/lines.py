"""Table of lines by room: Python and C of each package, tests, benchmarks, and the words of the documentation.

``make lines`` prints it. There is no limit here: it is read beside the table of an earlier commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SOURCE = ROOT / "src" / "remesh"
_OPENED = ("carried",)
"""Packages whose own packages have a line each."""
_SUFFIXES = ((".py",), (".c", ".h"))
"""Of Python, and of C."""


def find_rooms() -> list[str]:
    """The packages of the source by their path below it: ``layout``, ``carried/rounds``."""
    tops = [path.parent.name for path in _SOURCE.glob("*/__init__.py")]
    opened = [f"{top}/{path.parent.name}" for top in _OPENED for path in (_SOURCE / top).glob("*/__init__.py")]
    return sorted([top for top in tops if top not in _OPENED] + opened)


def count_lines(folder: Path, pattern: str = "**/*") -> tuple[int, int]:
    """Lines of Python and of C in a folder; what a build has made there is not counted."""
    files = [path for path in folder.glob(pattern) if "built" not in path.relative_to(folder).parts]
    python, c = (
        sum(path.read_bytes().count(b"\n") for path in files if path.suffix in suffixes) for suffixes in _SUFFIXES
    )
    return python, c


def count_words(folder: Path) -> int:
    """Words of the pages of a folder."""
    return sum(len(path.read_text().split()) for path in folder.rglob("*.md"))


def lines_of_rooms() -> Iterator[tuple[str, int, int]]:
    """Each room of the source with its lines of Python and of C, then what lies beside the packages, and all of it."""
    for room in find_rooms():
        yield room, *count_lines(_SOURCE / room)
    for folder in ("", *_OPENED):
        yield f"{folder or 'remesh'}/*", *count_lines(_SOURCE / folder, "*")
    yield "src", *count_lines(ROOT / "src")


def table() -> str:
    """The table as text."""
    rows = [*lines_of_rooms(), *((name, *count_lines(ROOT / name)) for name in ("tests", "benchmarks", "examples"))]
    lines = [f"{name:<20} {python:>8,} {c:>8,}" for name, python, c in rows]
    head, words = f"{'room':<20} {'Python':>8} {'C':>8}", f"{'docs, words':<20} {count_words(ROOT / 'docs'):>8,}"
    return "\n".join([head, *lines, words])


if __name__ == "__main__":
    print(table())
