"""The table of exit codes in the guide is the code's, and nothing ends with a code that is not in it."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from remesh.cli import main
from remesh.elasticity.model.outcome import Category
from remesh.foundation.exit_codes import ROWS, ExitCode, of_signal
from tests.rules.source_tree import modules

_GUIDE = Path(__file__).parents[3] / "docs" / "cli.md"
_TABLE = re.compile(r"(<!-- exit codes: .*? -->\n)(.*?)(<!-- /exit codes -->)", re.DOTALL)
# Processes of ours that no user starts: their codes are between them and us.
_INSIDE = (
    *(
        "remesh.carried.images.",
        "remesh.carried.mpi.library.",
        "remesh.carried.mpi.lower.",
        "remesh.testbed.rank_worker",
        "remesh.elasticity.link",
    ),
    "remesh.carried.torch.host",
)


def test_the_table_of_the_guide_is_the_codes() -> None:
    rows = [f"| {row.code} | {row.verbs} | {row.meaning} |" for row in ROWS]
    table = "\n".join(["| code | of | meaning |", "|---|---|---|", *rows]) + "\n"
    text = _GUIDE.read_text()
    if os.environ.get("REMESH_WRITE_DOCS"):
        _GUIDE.write_text(_TABLE.sub(lambda found: found[1] + table + found[3], text))
    found = _TABLE.search(_GUIDE.read_text())
    assert found is not None
    assert found[2] == table, "the guide's table of exit codes is old; write it anew with REMESH_WRITE_DOCS=1"


def test_every_code_has_its_row() -> None:
    told = {row.code for row in ROWS}
    assert {str(int(code)) for code in ExitCode} <= told
    assert {str(int(category.exit_code)) for category in Category} <= told
    assert told - {str(int(code)) for code in ExitCode} == {"128 + n", "another"}


def test_no_verb_ends_with_a_number_of_its_own() -> None:
    """Whoever ends a process names the code: a number would be in no table."""
    found = []
    for module in modules():
        if module.name.startswith(_INSIDE) or "exit" not in module.text.lower():
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "SystemExit", "os._exit", "exit"):
                numbers = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                if any(isinstance(number, int) for number in numbers):
                    found.append(f"{module.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["--help"], ExitCode.OK),
        (["plan", "--shape", "4,4", "--src", "S0R@2x2", "--dst", "RS0@2x2"], ExitCode.OK),
        (["plan", "--shape", "4,four", "--src", "S0@2", "--dst", "S0@2"], ExitCode.USAGE),
        (["plan"], ExitCode.USAGE),
        (["fly"], ExitCode.USAGE),
        (["run", "no_such_script.py"], ExitCode.USAGE),
        (["mpi", "restart", "no-such-job"], ExitCode.USAGE),
        (["testbed", "link", "a"], ExitCode.USAGE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_verb_ends_with_its_code(line: list[str], code: ExitCode) -> None:
    assert CliRunner().invoke(main, line).exit_code == code


def test_a_signal_is_told_as_a_shell_tells_it() -> None:
    assert of_signal(15) == 143


def test_an_interrupt_ends_a_verb_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("remesh.cli.group.LazyGroup.get_command", lambda *_: interrupted)
    assert CliRunner().invoke(main, ["any"]).exit_code == ExitCode.FAILED
