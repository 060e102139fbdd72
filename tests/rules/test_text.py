"""What holds for the text of every file: docstrings, sizes, no path of one machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.rules.source_tree import ROOT, modules

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


def test_modules_and_public_names_are_documented() -> None:
    bare = [module.name for module in modules() if not ast.get_docstring(module.tree)]
    for module in modules():
        undocumented = (node.name for node in _public_definitions(module.tree) if not ast.get_docstring(node))
        bare += [f"{module.name}.{name}" for name in undocumented]
    assert not bare, f"without a docstring: {', '.join(bare)}"


def test_modules_and_functions_stay_small() -> None:
    large = []
    for module in modules():
        num_lines = module.text.count("\n")
        if num_lines > _MAX_MODULE_LINES:
            large.append(f"{module.name} has {num_lines} lines: is it two modules?")
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > _MAX_FUNCTION_LINES:
                    large.append(f"{module.name}.{node.name} has {length} lines")
    assert not large, "\n".join(large)


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
    tiers = {"unit", "procs", "mpi", "netns", "browser", "gpu", "hosts", "stores", "pods", "slow"}
    assert roofs <= tiers | {"laws", "rules", "scenarios", "vectors", "golden", "attacks", "interop", "support"}
