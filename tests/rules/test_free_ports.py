"""A port for a server that starts later comes from one place: any other that is free now may be a client's then."""

import ast
from pathlib import Path

from tests.rules.source_tree import ROOT

_HOME = ROOT / "src" / "remesh" / "wire" / "free_ports.py"


def _given_back_at_once(path: Path) -> list[str]:
    """Sockets that are bound, asked for their port and closed."""
    found: list[str] = []
    text = path.read_text()
    if ".getsockname()[1]" not in text:
        return found
    for node in ast.walk(ast.parse(text, str(path))):
        if not isinstance(node, ast.With):
            continue
        *others, last = node.body
        binds = all(isinstance(other, ast.Expr) and ".bind(" in ast.unparse(other) for other in others)
        asks = isinstance(last, ast.Assign | ast.AnnAssign | ast.Return) and ".getsockname()[1]" in ast.unparse(last)
        if binds and asks:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_ports_for_later_come_from_one_place() -> None:
    folders = ("src", "tests", "benchmarks", "examples")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path != _HOME]
    found = [line for path in paths for line in _given_back_at_once(path)]
    assert not found, "ask remesh.wire.free_ports.free_port, or let the server take port 0 and tell"
