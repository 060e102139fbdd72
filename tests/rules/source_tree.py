"""The source of the package as the rules see it: modules, their rooms, and what they import when run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Module:
    """One source file of the package."""

    name: str
    """Dotted, with the package: ``remesh.layout.box``; a package stands for its ``__init__``."""
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree; many rules look through them."""
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """First part of the name under the package; empty for the package itself."""
        return [*self.name.split("."), ""][1]

    @cached_property
    def imports(self) -> frozenset[str]:
        """Everything this module imports when it is run, dotted; names below ``TYPE_CHECKING`` are not.

        ``from a.b import c`` counts as ``a.b.c`` where that is a module of this package, else as ``a.b``.
        """
        return self._imports_in(_run_nodes(self.tree))

    @cached_property
    def mentions(self) -> frozenset[str]:
        """Everything that the text imports anywhere: also below ``TYPE_CHECKING``, in functions, by a name in a string.

        A program that is started by ``-m`` is not imported.
        """
        texts = [n for n in self.nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        started = {id(after) for flag, after in pairwise(texts) if flag.value == "-m"}
        named = {text.value for text in texts if id(text) not in started}
        return self._imports_in(self.nodes) | (module_names() & named)

    def _imports_in(self, nodes: Iterable[ast.AST]) -> frozenset[str]:
        found = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: relative import"
                assert node.module is not None
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in module_names() or not node.module.startswith("remesh") else node.module)
        return frozenset(found)


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, without the bodies of ``if TYPE_CHECKING:``."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                waiting += child.orelse
            else:
                waiting.append(child)


@lru_cache
def module_names() -> frozenset[str]:
    """Dotted names of all modules of the package."""
    return frozenset(_name_of(path) for path in SOURCE.rglob("*.py"))


@lru_cache
def modules() -> tuple[Module, ...]:
    """All modules of the package, in order of name."""
    return tuple(sorted((Module(_name_of(p), p) for p in SOURCE.rglob("*.py")), key=lambda m: m.name))


def _name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of_all(roots: set[str]) -> frozenset[str]:
    """Everything that importing these modules of the package runs, itself and by others, packages included."""
    by_name = {module.name: module for module in modules()}
    seen: set[str] = set()
    waiting = set(roots)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in by_name:
            waiting |= by_name[name].imports
            # Importing a module runs the packages around it first.
            parts = name.split(".")
            waiting |= {".".join(parts[:n]) for n in range(1, len(parts))}
    return frozenset(seen)
