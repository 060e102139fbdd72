"""Which public names of mpi4py.MPI does the substitute lack? One line for each.

The names are those of the stub file of the real mpi4py, whose folder ``REMESH_MPI4PY`` names. Runs on the substitute:
``mpiexec -n 1 python lower_alone.py missing_names.py``.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    """Public names that statements define."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found = [node.name]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found = [node.target.id]
        elif isinstance(node, ast.Assign):
            found = [target.id for target in node.targets if isinstance(target, ast.Name)]
        else:
            found = []
        yield from (name for name in found if not name.startswith("_"))


def main() -> None:
    """Print them."""
    stub = ast.parse(Path(os.environ["REMESH_MPI4PY"], "MPI.pyi").read_text())
    aliases = {"BufSpec", "BufSpecB", "BufSpecV", "BufSpecW", "TargetSpec", "Buffer", "Bottom", "InPlace", "TypeSpec"}
    for name in sorted(set(names_of(stub.body)) - aliases):
        if not hasattr(MPI, name):
            print(name)
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and hasattr(MPI, node.name):
            for name in sorted(set(names_of(node.body))):
                if not hasattr(getattr(MPI, node.name), name):
                    print(f"{node.name}.{name}")


if __name__ == "__main__":
    main()
