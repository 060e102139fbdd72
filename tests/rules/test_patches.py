"""Tests put back what they exchange: the processes that run ranks serve one test after another."""

import ast
from pathlib import Path

from tests.rules.source_tree import ROOT

_TESTS = ROOT / "tests"


def _lasting_patches(path: Path) -> list[str]:
    """Assignments to an attribute of something imported: they outlive the function that makes them."""
    tree = ast.parse(path.read_text(), str(path))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in [part for each in targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]:
            owner = target
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(target, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in imported:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(target)}")
    return found


def test_what_a_test_exchanges_is_put_back_by_pytest() -> None:
    found = [line for path in sorted(_TESTS.rglob("test_*.py")) for line in _lasting_patches(path)]
    assert not found, "exchange it with pytest.MonkeyPatch.context()"
