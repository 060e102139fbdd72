"""Code blocks of a page, and how each is run. Pure.

A fence names its language:

    python    a program of its own. A first line ``# torchrun ... NAME.py`` or ``# remesh run ... NAME.py`` is the
              command that starts it; without one it is started by ``python``
    sh        command lines. One that ends in a comment of `LEFT_OUT` is compared with the parsers, and not run
    console   command lines after ``$``, and what they print
    json      is JSON
    text      a picture, a layout of bytes, a form: nothing that could be run
    mermaid   a diagram, compared with the code by a test of its own
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LANGUAGES = ("python", "sh", "console", "json", "text", "mermaid")
LEFT_OUT = (
    *("on every node", "needs an MPI", "needs root", "needs the package", "needs a checkpoint of"),
    *("takes minutes", "until Ctrl-C"),
)
"""What the comment beside a command, or in the first line of a program, says where this machine cannot run it."""

_NEEDS_PACKAGE = "# needs the package "
_APART = ("megatron.core", "vllm")
"""Hosts that are not in the environment of tests/hosts."""
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)    \S.*")
_STARTED_BY = re.compile(r"# (?P<command>(?:torchrun|remesh run) .*?(?P<name>\w+\.py))(?: .*)?\n")


@dataclass(frozen=True, slots=True)
class Block:
    """One fence of a page."""

    page: str
    """Relative to the root of the repository."""
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One command line, or a program with the command that starts it."""

    place: str
    words: tuple[str, ...]
    name: str = ""
    """Of the file that the program stands in; empty for a command of the page."""
    program: str = ""
    left_out: str = ""
    """Why no test of the default tier runs it: an entry of `LEFT_OUT`."""
    prints: str | None = None
    """What the page shows of its output; None where it shows nothing."""

    @property
    def is_run_with_hosts(self) -> bool:
        """Whether it needs the package of a host that stands in the environment of tests/hosts, which run it there."""
        package = self.program.removeprefix(_NEEDS_PACKAGE)
        return package != self.program and not package.startswith(_APART)


def pages() -> list[str]:
    """README and all pages of docs."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        lines = [line.removeprefix(fence["indent"]) for line in fence["text"].splitlines(keepends=True)]
        found.append(Block(page, text[: fence.start()].count("\n") + 1, fence["language"], "".join(lines)))
    return found


def indented_code_of(page: str) -> list[str]:
    """Code by four blanks, which has no language; lists may be indented, and what stands in a fence."""
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return [line for line in _INDENTED.findall(text) if not line.lstrip().startswith(("-", "*", "|", "1."))]


def commands_of(page: str) -> list[Command]:
    """What is run of a page, in order."""
    return [command for block in blocks_of(page) for command in _of_block(block)]


def _of_block(block: Block) -> Iterator[Command]:
    match block.language:
        case "python":
            started = _STARTED_BY.match(block.text)
            words = shlex.split(started["command"]) if started else ["python", "program.py"]
            left_out = _left_out(block.text.partition("\n")[0])
            yield Command(str(block), tuple(words), name=words[-1], program=block.text, left_out=left_out)
        case "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                yield from _of_line(str(block), line)
        case "console":
            for shown in block.text.split("$ ")[1:]:
                line, _, output = shown.partition("\n")
                yield from (replace(command, prints=output) for command in _of_line(str(block), line))


def _of_line(place: str, line: str) -> Iterator[Command]:
    if words := shlex.split(line, comments=True):
        yield Command(place, tuple(words), left_out=_left_out(line))


def _left_out(line: str) -> str:
    comment = line.partition("#")[2]
    return next((reason for reason in LEFT_OUT if reason in comment), "")
