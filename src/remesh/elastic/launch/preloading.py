"""Which process, if any, are the workers of a job forked of? It is started with the agent, and loads meanwhile."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from remesh.elastic.launch.forkable import why_plain
from remesh.elastic.launch.mode import Mode
from remesh.elastic.launch.request import Request, read_script
from remesh.elastic.node.config import DEFAULT_THREADS
from remesh.elastic.node.preload import Preload, PreloadPlan

_MODULES: Final = {
    Mode.IN_PROCESS: ("remesh.elastic.training.worker",),
    # The first optimizer of a script loads the second one.
    Mode.RESTART: ("torch", "torch._dynamo"),
}
_SCRIPT: Final = "__main__"
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
    script = _name_of(request)
    return why_plain(script, lambda name: read_script(request) if name == script else _text_of(request, name)) is None


def _name_of(request: Request) -> str:
    """The script's name as a module, from which its relative imports count."""
    if not request.values["module"]:
        return _SCRIPT
    is_package = Path(*request.script.split("."), "__main__.py").exists()
    return f"{request.script}.__main__" if is_package else request.script


def _text_of(request: Request, name: str) -> str | None:
    """The text of a module that the script finds before all others, because it is in the script's own folder."""
    folder = Path() if request.values["module"] else Path(request.script).resolve().parent
    base = folder.joinpath(*name.split("."))
    for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
        with contextlib.suppress(OSError, ValueError):
            return path.read_text(errors="replace")
    return None
