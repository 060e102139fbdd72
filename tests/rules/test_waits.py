"""Tests wait for what they wait for: a busy machine takes longer over everything, and an idle one less."""

import ast
import re
from pathlib import Path

from tests.rules.source_tree import ROOT

_TESTS = ROOT / "tests"
_HURTS = {"kill_node", "kill_worker", "preempt_node"}
_PROC_EXISTS = re.compile(r'Path\(f"/proc/\{[^"]*"\)\.exists\(\)')
_UNCHECKED = re.compile(r"suppress_health_check=\[([^\]]*)\]")


def _files() -> list[Path]:
    return [path for path in sorted(_TESTS.rglob("*.py")) if path != Path(__file__)]


def _found(pattern: re.Pattern[str]) -> list[tuple[str, re.Match[str]]]:
    return [
        (f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}", match)
        for path in _files()
        for text in [path.read_text()]
        for match in pattern.finditer(text)
    ]


def test_a_process_that_nobody_has_reaped_yet_does_not_run() -> None:
    found = [place for place, _ in _found(_PROC_EXISTS)]
    assert not found, "ask remesh.foundation.linux.procfs.start_of, which knows the dead that still have a folder"


def test_a_slow_machine_makes_no_example_unhealthy() -> None:
    found = [place for place, match in _found(_UNCHECKED) if "too_slow" not in match[1]]
    assert not found, "what a test says of its health checks replaces the profile's: name HealthCheck.too_slow too"


def test_who_waits_for_the_end_of_a_program_says_for_how_long() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _files()
        if "communicate" in (text := path.read_text())
        for node in ast.walk(ast.parse(text, str(path)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "communicate"
        if not node.args and not node.keywords
    ]
    assert not found, "communicate(timeout=...): else a program that hangs ends the test without a word of it"


def _hurts_in_flight(path: Path) -> list[str]:
    """Functions that hurt a job of few steps while it goes on."""
    text = path.read_text()
    if not any(name in text for name in _HURTS):
        return []
    functions = [node for node in ast.walk(ast.parse(text, str(path))) if isinstance(node, ast.FunctionDef)]
    found = []
    for function in functions:
        calls = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        if calls & _HURTS and not {"hold", "follow"} & (
            calls | {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        ):
            found.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}")
    return found


def test_a_job_that_is_hurt_waits_for_it() -> None:
    found = [place for path in sorted((_TESTS / "procs").glob("test_*.py")) for place in _hurts_in_flight(path)]
    assert not found, "hold the job at a step (tests.support.hold): it may be over before the test gets there"
