"""Programs as `python PROGRAM ARGUMENTS` runs them, in processes that are forked of one that has torch already.

Shared is the import of torch, which most of them would begin with. Nothing else: each has a process of its own, with
its own imports and names.
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from remesh.testing.rank_process import fork_server

_CHILD = Path(__file__).with_name("scripts") / "forked.py"
ALONE: Final = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "120"}
"""Variables of a program that nobody launches."""


def start(words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path, errors: Path) -> Any:
    """The process of a program, or of a command of ours, in a folder; what it prints is put behind what is there."""
    told = {
        "OUTPUT": str(output),
        "ERRORS": str(errors),
        "FOLDER": str(folder),
        "WORDS": tuple(words),
        "ENVIRONMENT": dict(environment),
    }
    process = fork_server().Process(
        target=runpy.run_path, args=(str(_CHILD),), kwargs={"init_globals": told, "run_name": "__main__"}
    )
    process.start()
    return process


def end(processes: Sequence[Any], limit_s: float) -> list[int | None]:
    """Exit codes of processes, once all have ended; None for one that has not done so in time, and is killed."""
    deadline_s = time.monotonic() + limit_s
    try:
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def run_program(program: Path, folder: Path, *arguments: str, limit_s: float = 100.0) -> str:
    """What a program prints that is run in a folder. AssertionError, with that, unless it ends well."""
    output, errors = folder / ".output", folder / ".errors"
    (code,) = end([start([str(program), *arguments], folder, ALONE, output, errors)], limit_s)
    said, told = (path.read_text(errors="replace") for path in (output, errors))
    assert code == 0, f"{program.name} ended with {code} (None: not within {limit_s:.0f} s):\n{said}{told}"
    return said
