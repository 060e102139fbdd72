"""mpi4py for programs that Remesh carries: the same names, no MPI library in the process.

``mpi4py.MPI`` is ours. What is pure Python in mpi4py (``mpi4py.futures``, ``mpi4py.util``, ``mpi4py.run``) comes from
the program's own mpi4py, or else from that of the lower half, and runs on top of our ``MPI``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any

__version__ = "4.1.2"
__author__ = "Remesh"
__all__ = ["MPI"]

_HERE = Path(__file__).resolve().parent
REAL_VARIABLE = "REMESH_MPI4PY"
"""Folder of a real mpi4py, for its pure Python parts."""


class Rc:
    """Options that programs set before they import ``mpi4py.MPI``; kept, and without effect."""

    __name__ = "mpi4py.rc"
    __spec__ = None

    initialize = True
    threads = True
    thread_level = "multiple"
    finalize: bool | None = None
    fast_reduce = True
    recv_mprobe = True
    irecv_bufsz = 32768
    errors = "exception"

    def __init__(self, **named: Any) -> None:
        self(**named)

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(self, name):
            raise TypeError(f"there is no option {name!r}")
        super().__setattr__(name, value)

    def __call__(self, **named: Any) -> None:
        for key, value in named.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"<{__name__}.rc>"


rc = Rc()
sys.modules[f"{__name__}.rc"] = rc  # type: ignore[assignment]  # as mpi4py does: `import mpi4py.rc`


def get_include() -> str:
    """There are no C headers: nothing can be compiled against a program's upper half."""
    raise NotImplementedError("mpi4py.get_include: programs that call MPI from C are not carried")


def get_config() -> dict[str, str]:
    """How mpi4py was built: not at all."""
    return {}


def profile(name: str, *, path: Any = None) -> None:
    """Nothing but a warning: a profiler would have to stand between the program and an MPI library."""
    warnings.warn(f"mpi4py.profile: {name!r} is not loaded, as the program has no MPI library", stacklevel=2)


def _real_folder() -> str | None:
    for entry in [os.environ.get(REAL_VARIABLE, ""), *(os.path.join(entry or ".", "mpi4py") for entry in sys.path)]:
        if entry and Path(entry).is_dir() and Path(entry).resolve() != _HERE and Path(entry, "util").is_dir():
            return str(Path(entry).resolve())
    return None


def _make_remesh_importable() -> None:
    """``remesh`` is the package that this file is part of, even if the program's Python has none, or another one."""
    package = _HERE.parents[2]
    found = importlib.util.find_spec("remesh")
    if found is not None and found.origin is not None and Path(found.origin).resolve().parent == package:
        return
    if "remesh" in sys.modules:
        raise ImportError(f"import mpi4py before remesh: {found and found.origin} is loaded, expected {package}")
    spec = importlib.util.spec_from_file_location(
        "remesh", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["remesh"] = module
    spec.loader.exec_module(module)


_make_remesh_importable()
_real = _real_folder()
__path__ = [str(_HERE), *([_real] if _real is not None else [])]
