"""What holds for the text of every file: docstrings, sizes, no path of one machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules.source_tree import ROOT, Module, modules

_MAX_MODULE_LINES = 600
_MAX_FUNCTION_LINES = 70
_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".html", ".svg", ".sh", ".yml"}
_FOLDERS = ("src", "tests", "docs", "benchmarks", "examples", ".ci")
_HOMES = re.compile(r"(?<![\w.:/])/(?:" + "|".join(["work", "root", "home", "Users"]) + r")/\w")
_LINK = re.compile(r"\]\(([^)\s]+)\)")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _public_definitions(tree: ast.Module) -> Iterator[Definition]:
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_public_names_are_documented(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.name} does not say what it is for"
    bare = [node.name for node in _public_definitions(module.tree) if not ast.get_docstring(node)]
    assert not bare, f"{module.name}: {', '.join(bare)} without a docstring"


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_modules_and_functions_stay_small(module: Module) -> None:
    num_lines = module.text.count("\n")
    assert num_lines <= _MAX_MODULE_LINES, f"{module.name} has {num_lines} lines: is it two modules?"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            assert length <= _MAX_FUNCTION_LINES, f"{module.name}.{node.name} has {length} lines"


def _text_files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in _SUFFIXES)
    yield ROOT / "Makefile"
    for folder in _FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in _SUFFIXES and "out" not in path.relative_to(ROOT).parts:
                yield path


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in _text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if _HOMES.search(line)
    ]
    assert not found, "\n".join(found)


def test_links_of_the_documents_lead_somewhere() -> None:
    dead = [
        f"{path.relative_to(ROOT)} -> {target}"
        for path in _text_files()
        if path.suffix == ".md"
        for target in _LINK.findall(path.read_text())
        if not target.startswith(("http:", "https:", "#")) and not (path.parent / target.partition("#")[0]).exists()
    ]
    assert not dead, "\n".join(dead)


def test_every_folder_of_tests_is_under_a_known_roof() -> None:
    roofs = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("_")}
    tiers = {"unit", "procs", "mpi", "netns", "browser", "gpu", "slow"}
    assert roofs <= tiers | {"laws", "rules", "scenarios", "vectors", "golden", "attacks", "interop"}
