"""A module that a process of ours is started with by ``-m`` is not imported by the packages around it.

Python would run it a second time, and says so on the standard error of the user's program.
"""

from __future__ import annotations

import ast
from itertools import pairwise

from tests.rules.source_tree import imports_of_all, module_names, modules


def test_no_package_imports_what_is_started_inside_it() -> None:
    twice = []
    for module in modules():
        texts = [node for node in module.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for flag, name in pairwise(text.value for text in texts):
            if flag != "-m" or name not in module_names() or f"{name}.__main__" in module_names():
                continue
            parts = name.split(".")
            if name in imports_of_all({".".join(parts[:n]) for n in range(1, len(parts))}):
                twice.append(f"{module.name} starts {name}, which its own package imports")
    assert not twice, "\n".join(twice)
