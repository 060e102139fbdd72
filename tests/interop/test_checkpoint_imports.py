"""Every name that a release of Megatron Core imports from `dist_checkpointing`, anywhere, is here or listed as absent.

`make interop` installs the releases. Their files are parsed and never run.
"""

from __future__ import annotations

import ast
import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_NAMES = json.loads((_ROOT / "tests/vectors/checkpoint_names.json").read_bytes())
_THEIRS, _OURS = "megatron.core.dist_checkpointing", "remesh.dist_checkpointing"

pytestmark = pytest.mark.long


def imported_names(source: str, package: list[str]) -> Iterator[str]:
    """Dotted names of what a module of the package imports, those relative to it in full."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their escapes
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *filter(None, [node.module])]
            yield from (".".join([*module, alias.name]) for alias in node.names)


def names_of_release(folder: Path) -> dict[str, str]:
    """Of each name that is imported, without the package's own, a file that imports it."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("megatron/**/*.py")):
        where = file.relative_to(folder)
        for name in imported_names(file.read_text(encoding="utf-8"), list(where.parts[:-1])):
            if name.startswith(f"{_THEIRS}."):
                found.setdefault(name.removeprefix(f"{_THEIRS}."), str(where))
    return found


def is_here(name: str) -> bool:
    module, _, attribute = f"{_OURS}.{name}".rpartition(".")
    try:
        if hasattr(importlib.import_module(module), attribute):
            return True
        importlib.import_module(f"{module}.{attribute}")
    except ModuleNotFoundError:
        return False
    return True


def is_listed(name: str) -> bool:
    """Whether it, or the module that has it, is one of the documented absences."""
    parts = name.split(".")
    return any(".".join(parts[:number]) in _NAMES["absent"] for number in range(1, len(parts) + 1))


def test_imports_of_every_kind_are_found() -> None:
    source = "import a.b\nfrom ..core import c\nfrom . import d\ndef f():\n    from a.b import e as g"
    assert [*imported_names(source, ["m", "n"])] == ["a.b", "m.core.c", "m.n.d", "a.b.e"]


def test_every_release_finds_its_imports_here() -> None:
    folders = sorted(folder for folder in (_ROOT / ".interop").glob("*") if (folder / "megatron").is_dir())
    if not folders:
        pytest.skip("needs releases of megatron-core, which `make interop` installs")
    unknown = {}
    for folder in folders:
        names = names_of_release(folder)
        assert len(names) > 50, f"{folder.name} imports from itself; found {sorted(names)}"
        wanted = {name: where for name, where in names.items() if not is_here(name) and not is_listed(name)}
        unknown |= {f"{folder.name}: {name}": where for name, where in wanted.items()}
    assert not unknown
