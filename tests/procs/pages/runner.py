"""Runner of a page's code blocks: in processes that share a folder, from the top of the page down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from remesh.wire.free_ports import free_port
from tests.procs.forked_programs import ALONE, QUIET_S, end, module_of, start
from tests.procs.pages.blocks import Command


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
        words = command.words[1:]
        if command.words[0] == "remesh":
            words = ["-m", module_of(words), *words]
    return _run_processes(command, folder, words, environments)


def _ranks(size: int) -> list[dict[str, str]]:
    """The variables that torchrun gives to each rank of a job on one node."""
    port = free_port()
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _run_processes(
    command: Command, folder: Path, words: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> str:
    log = folder / ".output"
    log.unlink(missing_ok=True)
    codes = end([start(words, folder, {**ALONE, **one}, log, log) for one in environments])
    printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    assert codes == [0] * len(codes), (
        f"{command.place}: {' '.join(command.words)} ended with {codes} "
        f"(None: stood still for {QUIET_S:.0f} s):\n{printed}"
    )
    return printed
