"""What a docstring names in backquotes exists: a reader who looks for it finds it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.rules.source_tree import modules

_REFERENCE = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
_WORD = re.compile(r"[A-Za-z_]\w*")
Words = set[str]


def _words_of(tree: ast.AST) -> Iterator[str]:
    """Every identifier in the code below a node, and every string that could be one, as in a table of names."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                module = getattr(node, "module", None) or ""
                yield from (part for text in (module, *(alias.name for alias in names)) for part in text.split("."))
            case ast.Constant(value=str(text)) if _WORD.fullmatch(text):
                yield text


def _docstrings(tree: ast.AST) -> Iterator[str]:
    """Texts that stand by themselves: docstrings, and what is said below a field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def test_every_name_in_backquotes_exists() -> None:
    words: Words = {part for module in modules() for part in module.name.split(".")}
    members: dict[str, Words] = defaultdict(set)
    for module in modules():
        words.update(_words_of(module.tree))
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                # What a class inherits is not looked for.
                members[node.name].update(_words_of(node), ["*"] if node.bases else [])
    gone = []
    for module in modules():
        for reference in (found for text in _docstrings(module.tree) for found in _REFERENCE.findall(text)):
            *around, last = reference.split(".")
            known = members.get(around[-1], {"*"}) if around else {"*"}
            if not {*around, last} <= words or not known & {last, "*"}:
                gone.append(f"{module.name} names `{reference}`")
    assert not gone, "\n".join(gone)
