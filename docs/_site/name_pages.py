"""``.. remesh-names:: MODULE``: the public names of a module, from their docstrings.

Public is what the module lists in ``__all__``, or else what it defines itself without a leading underscore.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import remesh


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("remesh-names", _Names)
    return {"parallel_read_safe": True}


class _Names(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the page follows from the code, not from its own text alone
        module = importlib.import_module(self.arguments[0])
        lines = [f".. py:module:: {module.__name__}", ""]
        for name in _names_of(module):
            lines += _describe(module.__name__, name, getattr(module, name))
        return self.parse_text_to_nodes("\n".join(lines))


def _names_of(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(name for name in own if not name.startswith("_"))


def _describe(module: str, name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type):
        yield f".. autoclass:: {module}.{name}"
        if issubclass(value, BaseException):
            yield "   :no-members:"
        elif issubclass(value, enum.Enum):
            yield "   :undoc-members:"
    elif callable(value):
        yield f".. autofunction:: {module}.{name}"
    else:
        yield f".. py:data:: {name}"
    if module != "remesh" and name in remesh.__all__:
        yield "   :no-index:"  # the page of `remesh` is its home
    yield ""
