"""Which process, if any, are the workers of a job forked of? It is started with the agent, and loads meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from remesh.elasticity.launch.forkable import LOADED, why_plain
from remesh.elasticity.launch.mode import Mode
from remesh.elasticity.launch.request import Request, find_module, read_script
from remesh.elasticity.node.config import DEFAULT_THREADS
from remesh.elasticity.node.preload import Preload, PreloadPlan

_MODULES: Final = {
    Mode.IN_PROCESS: ("remesh.elasticity.training.worker",),
    # The first optimizer of a script loads the second one.
    Mode.RESTART: ("torch", "torch._dynamo"),
}
_SCRIPT: Final = "__main__"
_SITE: Final = ("sitecustomize", "usercustomize")
"""Loaded by Python before the script, in every worker: after the modules that are loaded before it is forked."""
_PACKAGES: Final = {"site-packages", "dist-packages"}
"""Folders with one of these names hold what others wrote."""
_PYTHON: Final = (sys.executable, "-u")


@contextlib.contextmanager
def preloaded(
    request: Request, mode: Mode, command: Sequence[str], tell: Callable[[str], object]
) -> Iterator[Preload | None]:
    """The process of which workers with this command are forked, which has begun to load; None: none is."""
    if not _may_fork(request, command):
        yield None
        return
    environment = dict(os.environ)
    if mode is Mode.IN_PROCESS:
        environment.setdefault("OMP_NUM_THREADS", DEFAULT_THREADS)
    with Preload(PreloadPlan(tuple(command), _MODULES[mode]), environment, tell) as preload:
        yield preload


def _may_fork(request: Request, command: Sequence[str]) -> bool:
    values = request.values
    if values["no_preload"] or values["no_python"] or values["run_path"] or values["numa_binding"]:
        return False
    # Each worker has the same command line, and its program is this Python itself, no script that calls one.
    if tuple(command[:2]) != _PYTHON or any("${" in part for part in command):
        return False
    if not os.path.samefile(sys.executable, "/proc/self/exe") or Path(request.script).is_dir():
        return False
    return why_not_forked(request) is None


def why_not_forked(request: Request) -> str | None:
    """What is written in the script, or in what it imports, that speaks against forking."""
    script, roots_of = _name_of(request), functools.cache(_roots_of)

    def text_of(name: str) -> str | None:
        """The text of a module of the script's author: of one in the script's folder, or that is not installed."""
        if name == script:
            return read_script(request)
        if name in _SITE:
            return _read(Path(getattr(sys.modules.get(name), "__file__", None) or os.devnull))
        return _find_text(name, [_folder_of(request), *roots_of(name.partition(".")[0])])

    return why_plain(script, text_of, _SITE)


def _name_of(request: Request) -> str:
    """The script's name as a module, from which its relative imports count."""
    if not request.values["module"]:
        return _SCRIPT
    path = find_module(request.script)
    return f"{request.script}.__main__" if path is not None and path.name == "__main__.py" else request.script


def _folder_of(request: Request) -> Path:
    return Path() if request.values["module"] else Path(request.script).resolve().parent


def _find_text(name: str, roots: Sequence[Path]) -> str | None:
    """The text of the module that is found first in these folders."""
    for root in roots:
        base = root.joinpath(*name.split("."))
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if (text := _read(path)) is not None:
                return text
    return None


def _roots_of(top: str) -> list[Path]:
    """The folders of a module that is found elsewhere, but was not installed: by ``PYTHONPATH``, or to be edited."""
    spec = None
    if top not in LOADED:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = find_spec(top)
    if spec is None:
        return []
    files = spec.submodule_search_locations or [spec.origin or ""]
    return [Path(file).parent for file in files if os.path.isabs(file) and not _is_installed(Path(file))]


def _is_installed(file: Path) -> bool:
    return file.is_relative_to(Path(os.__file__).parent) or not _PACKAGES.isdisjoint(file.parts)


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(errors="replace")
    return None
