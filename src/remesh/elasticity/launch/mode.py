"""Choice between the two modes of ``remesh run``, from the script's text.

*In-process*: the script calls :func:`remesh.elastic`; survivors of a failure keep their processes.
*Restart*: any script that torchrun can start; all workers are started anew after a failure, as torchrun does.

The two need different things before the first line of the script runs (restart mode gives ranks in the environment,
in-process mode a link to the agent), so the choice is made from the text: a script is in-process if it imports
``remesh.elastic``, or imports ``elastic`` from ``remesh``, or calls ``remesh.elastic`` under whatever name it gave
``remesh``. A script that gets there through a module of its own needs ``--mode in-process``.
"""

from __future__ import annotations

import ast
import enum
from dataclasses import dataclass


class Mode(enum.Enum):
    """How workers are looked after."""

    IN_PROCESS = "in-process"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode, and the reason in words."""

    mode: Mode
    reason: str


def decide_mode(source: str) -> ModeChoice:
    """The mode for a script with this text.

    >>> decide_mode("import remesh\\nremesh.elastic(train, mesh={'dp': -1})").mode
    <Mode.IN_PROCESS: 'in-process'>
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ModeChoice(Mode.RESTART, "the script is no Python that this interpreter can read")
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("remesh.elasticity"):
                    return ModeChoice(Mode.IN_PROCESS, f"line {node.lineno} imports {alias.name}")
                if alias.name == "remesh":
                    names.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.startswith("remesh.elasticity") or (
                module == "remesh" and any(alias.name == "elastic" for alias in node.names)
            ):
                return ModeChoice(Mode.IN_PROCESS, f"line {node.lineno} imports remesh.elastic")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "elastic" and ast.unparse(node.value) in names:
            return ModeChoice(Mode.IN_PROCESS, f"line {node.lineno} uses remesh.elastic")
    return ModeChoice(Mode.RESTART, "the script does not name remesh.elastic")
