"""How is what stands on a page run? In processes of its own, forked from one that has torch already.

Shared is the import of torch, and, between the blocks of one page, the folder: a page is followed from its top. Nothing
else: every program and every command has a process of its own, with its own imports and names.
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remesh.comm.free_ports import free_port
from remesh.testing.rank_process import fork_server
from tests.procs.pages.blocks import Command

_CHILD = Path(__file__).with_name("child.py")
_LIMIT_S = 90.0


def run(command: Command, folder: Path) -> str:
    """Run it in the folder; what it printed. AssertionError, with that, when it fails or does not end."""
    if command.program:
        (folder / command.name).write_text(command.program, encoding="utf-8")
    if command.words[0] == "torchrun":
        size = int(command.words[command.words.index("--nproc-per-node") + 1])
        environments = list(_ranks(size))
        words = command.words[command.words.index("--nproc-per-node") + 2 :]
    else:
        environments = [{}]
        words = command.words[1:] if command.words[0] == "python" else command.words
    return _run_processes(command, folder, words, environments)


def _ranks(size: int) -> list[dict[str, str]]:
    """The variables that torchrun gives to each rank of a job on one node."""
    port = free_port()
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _run_processes(
    command: Command, folder: Path, words: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> str:
    context = fork_server()
    log = folder / ".output"
    log.unlink(missing_ok=True)
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "120"}
    processes: list[Any] = []
    for environment in environments:
        told = {"LOG": str(log), "FOLDER": str(folder), "WORDS": tuple(words), "ENVIRONMENT": {**own, **environment}}
        process = context.Process(
            target=runpy.run_path, args=(str(_CHILD),), kwargs={"init_globals": told, "run_name": "__main__"}
        )
        process.start()
        processes.append(process)
    deadline_s = time.monotonic() + _LIMIT_S
    try:
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    assert codes == [0] * len(codes), (
        f"{command.place}: {' '.join(command.words)} ended with {codes} (None: not within {_LIMIT_S:.0f} s):\n{printed}"
    )
    return printed
