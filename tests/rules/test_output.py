"""What the commands print goes through one module, which never takes text for markup."""

from __future__ import annotations

import ast

from tests.rules.source_tree import modules

_PRINTER = "remesh.cli.shown"
_PRINTS = {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write", "Console"}


def test_nothing_but_the_printer_prints() -> None:
    found = []
    for module in modules():
        if not module.name.startswith(("remesh.cli.", "remesh.dashboard.")) or module.name == _PRINTER:
            continue
        calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        found += [f"{module.name}:{call.lineno}" for call in calls if ast.unparse(call.func) in _PRINTS]
        found += [
            f"{module.name}:{node.lineno} imports Console"
            for node in module.nodes
            if isinstance(node, ast.ImportFrom) and "Console" in {name.name for name in node.names}
        ]
    assert not found, f"only {_PRINTER} prints: {', '.join(found)}"


def test_the_printer_lets_no_text_be_markup() -> None:
    (printer,) = (module for module in modules() if module.name == _PRINTER)
    made = [node for node in printer.nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Console"]
    assert made, "it makes a console"
    for call in made:
        markup = [word.value for word in call.keywords if word.arg == "markup"]
        assert [ast.unparse(value) for value in markup] == ["False"], f"line {call.lineno}"
