"""One machine stands in one place, and the rooms of cuts and images know of no communication library."""

from __future__ import annotations

import ast
import re

import pytest

from tests.rules.source_tree import Module, modules

# What only the home of a machine says, by what it is; whoever else says it makes the machine a second time.
_HOMES = {
    "checksums": (r"\bzlib\.(crc32|compress)\b|\bisal\b", {"remesh.foundation.checksums"}),
    # Stores also write as a stream.
    "durable writes": (r"\bos\.fsync\b", {"remesh.checkpoint.storage.store", "remesh.foundation.files"}),
    "memory maps": (r"/maps\b", {"remesh.foundation.linux.proc_text", "remesh.foundation.linux.procfs"}),
    "userfaultfd": (r"\b0x[Cc]0[0-9A-Fa-f]{2}[Aa]{2}[0-9A-Fa-f]{2}\b", {"remesh.foundation.linux.userfault"}),
    "retention": (r"\bclass Keep(Last|Every|Best)", {"remesh.foundation.retention"}),
    "pools of ranks": (r"get_context\(.forkserver.\)", {"remesh.testbed.rank_process"}),
}


@pytest.mark.parametrize("machine", _HOMES)
def test_a_machine_stands_in_one_place(machine: str) -> None:
    pattern, homes = _HOMES[machine]
    said = {module.name for module in modules() if re.search(pattern, module.text, re.MULTILINE)}
    assert said <= homes, f"{sorted(said - homes)} make {machine} again; they stand in {sorted(homes)}"


def _identifiers(module: Module) -> set[str]:
    """Every name that the code of a module makes or uses, and what it imports."""
    found = set(module.imports)
    for node in module.nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                found.add(name)
    return found


@pytest.mark.parametrize("room", ["carried.images", "foundation.linux", "carried.rounds"])
def test_cuts_and_images_know_neither_mpi_nor_torch(room: str) -> None:
    known = re.compile(r"(^|[._])(mpi|mpi4py|torch|c10d|nccl|gloo)($|[._0-9])", re.IGNORECASE)
    inside = [module for module in modules() if module.name.startswith(f"remesh.{room}.")]
    assert inside
    wrong = {module.name: {name for name in _identifiers(module) if known.search(name)} for module in inside}
    assert not any(wrong.values()), {name: sorted(names) for name, names in wrong.items() if names}
