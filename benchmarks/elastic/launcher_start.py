"""Processor time of a start: `remesh run` and all its processes in restart mode, beside torchrun's.

Three starts: up to the first flag that is read (``--help``); two workers whose script imports nothing; two workers that
import torch and make an optimizer, as most scripts do. Both launchers take turns, in changing order. Time is that of
the launcher and of every process that it has waited for, as the kernel counted it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.elastic.attempts import LAUNCHERS, NUM_RANKS
from benchmarks.report import Row, at_most

ABOUT = "restart mode, start"
HELP = "--help"
SCRIPTS = {
    "workers that import nothing": "",
    "workers that import torch and make an optimizer": (
        "import torch\ntorch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
    ),
}
STARTS = (HELP, *SCRIPTS)
GOAL = 1.0
"""Our time over torchrun's, at most: what workers load is the same under both."""


def rows(num_runs: int) -> list[Row]:
    """The median of each launcher, and of the ratios of runs that follow each other."""
    told: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        commands = {start: _arguments(start, number, Path(name)) for number, start in enumerate(STARTS)}
        for run in range(num_runs):
            for start, arguments in commands.items():
                for launcher in list(LAUNCHERS)[:: (-1) ** run]:
                    told.setdefault((start, launcher), []).append(processor_s([*LAUNCHERS[launcher], *arguments]))
    return [row for start in STARTS for row in rows_of(start, told[start, "remesh"], told[start, "torchrun"])]


def _arguments(start: str, number: int, folder: Path) -> list[str]:
    if start == HELP:
        return [HELP]
    script = folder / f"script{number}.py"
    script.write_text(SCRIPTS[start])
    return ["--standalone", "--nproc-per-node", str(NUM_RANKS), str(script)]


def processor_s(command: Sequence[str]) -> float:
    """Seconds of processor time of a launcher and all that it has waited for; RuntimeError if it fails."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            output.seek(0)
            said = output.read().decode(errors="replace")
            raise RuntimeError(f"starting {' '.join(command)}: it ended with {process.returncode}\n{said}")
    return used.ru_utime + used.ru_stime


def rows_of(start: str, ours: Sequence[float], theirs: Sequence[float]) -> list[Row]:
    """What is told of one start, of which these were the seconds, run by run."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    about = f"{ABOUT}, {start}"
    return [
        Row(f"{about}: remesh, processor time", statistics.median(ours), "s"),
        Row(f"{about}: torchrun, processor time", statistics.median(theirs), "s"),
        at_most(f"{about}: remesh over torchrun", statistics.median(ratios), "ratio", GOAL, peer="torchrun"),
    ]
