"""No tensor is made where, or of what, the program's defaults say: each factory call names its device and its dtype."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torch.utils._device import _device_constructors

from tests.rules.source_tree import Module, modules

# All whose device is that of `torch.set_default_device`, as torch itself lists them.
_FACTORIES = {factory.__name__ for factory in _device_constructors()}


def _calls(module: Module) -> Iterator[ast.Call]:
    for node in module.nodes:
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if re.fullmatch(r"torch\.\w+", name) and name.removeprefix("torch.") in _FACTORIES:
            assert isinstance(node, ast.Call)
            yield node


def _lacking(call: ast.Call) -> set[str]:
    return {"device", "dtype"} - {keyword.arg for keyword in call.keywords if keyword.arg is not None}


def test_every_factory_names_device_and_dtype() -> None:
    found = {
        f"{module.name}:{call.lineno} {ast.unparse(call.func)} without {', '.join(sorted(_lacking(call)))}"
        for module in modules()
        for call in _calls(module)
        if _lacking(call)
    }
    assert not found, "a program may set a default device or dtype; ranks that differ in it would hang in a collective"


def test_factories_are_called_by_their_full_names() -> None:
    found = {
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        if _FACTORIES & {name.name for name in node.names}
    }
    assert not found, "the rule above sees torch.empty, and not empty"


def test_the_rule_sees_what_it_is_for() -> None:
    assert {"empty", "zeros", "tensor", "arange", "full"} <= _FACTORIES
    (call,) = (node for node in ast.walk(ast.parse("torch.empty(1, dtype=torch.uint8)")) if isinstance(node, ast.Call))
    assert _lacking(call) == {"device"}
