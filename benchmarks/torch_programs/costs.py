"""Costs of carrying a torch program, of its checkpoints and restarts, beside torch alone, in turns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Row, at_most, spread_of
from remesh.carried.rounds.job_folder import JobFolder
from remesh.foundation.linux.calls import make_buffer
from remesh.wire.free_ports import free_port

_WORKER = str(Path(__file__).with_name("worker.py"))
_CALLS = str(Path(__file__).with_name("calls.py"))
_GROWTH = str(Path(__file__).with_name("growth.py"))
_REMESH = (sys.executable, "-m", "remesh", "torch")
_PATIENCE_S = 300.0
_RANKS = 2
_STEP_RANKS = 4
_GROWN_RANKS = 8
_APART = ", a processor for each rank"
_RUNGS = {
    "forwards": "by a Python method that forwards",
    "python": "if all of ours is in Python",
}
_STEPS = {
    "ddp-4": "DDP, 4 M parameters, 2 ranks",
    "ddp-25": "DDP, 25 M parameters, 4 ranks",
    "fsdp": "FSDP2, 2 M parameters, 4 ranks",
}
_CHUNK_BYTES = 1 << 20
_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What `remesh torch checkpoint` said of one."""

    mib: float
    total_s: float
    cut_s: float


@dataclass(frozen=True, slots=True)
class _Saved:
    """A job that was saved twice and brought back, beside the same bytes written and read by one process."""

    first: _Checkpoint
    """Asked for as soon as the program had measured itself."""
    second: _Checkpoint
    restart_s: float
    """From the command until all ranks run."""
    written_s: float
    read_s: float


def rows(turns: int) -> list[Row]:
    """All cases; each value is the least of its turns, those of single calls are medians."""
    pairs = str(100 * turns)
    calls = [*_call_rows("", _run_calls(pairs)), *_call_rows(_APART, _run_calls(pairs, "apart"))]
    small, saved = _compare("ddp-4", _RANKS, turns, saves=True)
    large, _ = _compare("ddp-25,fsdp", _STEP_RANKS, max(turns - 1, 1), saves=False)
    by_turns = {**_run_turns("ddp-4", _RANKS), **_run_turns("ddp-25,fsdp", _STEP_RANKS)}
    steps = {**small, **large}
    return [
        *calls,
        *(row for case, what in _STEPS.items() for row in _step_rows(what, steps[case], by_turns[case])),
        *_saved_rows(saved),
        at_most(f"groups of {_GROWN_RANKS} ranks grown again", min(_run_growth(_GROWN_RANKS, turns + 1)), "s", 0.5),
    ]


# --- rows ---


@dataclass(frozen=True, slots=True)
class _Compared:
    """One case, in seconds."""

    native: float
    carried: float
    spread: float
    """Of the native ones."""


def _compare(cases: str, num_ranks: int, turns: int, *, saves: bool) -> tuple[dict[str, _Compared], list[_Saved]]:
    native, carried, saved = [], [], []
    for _ in range(turns):
        native.append(_run_native(cases, num_ranks))
        found, more = _run_carried(cases, num_ranks, saves=saves)
        carried.append(found)
        saved += more
    compared = {}
    for case in cases.split(","):
        alone, with_us = ([each[case] for each in runs] for runs in (native, carried))
        compared[case] = _Compared(min(alone), min(with_us), spread_of(alone))
    return compared, saved


def _call_rows(where: str, found: dict[str, dict[str, float]]) -> list[Row]:
    """The rows of one placement. Each rung does what the one before it does, and ours all of that."""
    what = f"all_reduce of 4 bytes{where}"
    rows = []
    for clock, how in (("passed", ""), ("computed", ", computed by a rank")):
        took_us = {name: value * 1e6 for name, value in found[clock].items()}
        rows.append(Row(f"{what}{how}, native", took_us["native"], "us"))
        if where == _APART:
            rows += [Row(f"{what}{how}, added {rung}", took_us[name], "us") for name, rung in _RUNGS.items()]
        goal = 10 if clock == "passed" else None
        rows.append(at_most(f"{what}{how}, added", took_us["ours"], "us", goal, peer="torch alone"))
    return rows


def _step_rows(what: str, step: _Compared, turns: dict[str, float]) -> list[Row]:
    """Whole runs beside each other; and steps of both kinds in turns, in the same processes."""
    return [
        Row(f"step of {what}, native", step.native * 1e3, "ms", spread=step.spread),
        at_most(f"step of {what}", step.carried / step.native, "ratio", 1.02, peer="torch alone"),
        Row(f"step of {what}, in turns, native", turns["native"] * 1e3, "ms"),
        at_most(f"step of {what}, in turns", turns["passed"], "ratio", 1.02, peer="torch alone"),
        Row(f"step of {what}, in turns, computed by a rank", turns["computed"], "ratio"),
    ]


def _saved_rows(saved: Sequence[_Saved]) -> list[Row]:
    cut_s = min(min(each.first.cut_s, each.second.cut_s) for each in saved)
    first = min(each.first.total_s / each.written_s for each in saved)
    second = min(each.second.total_s / each.written_s for each in saved)
    beyond_s = min(each.restart_s - 1.25 * each.read_s for each in saved)
    return [
        at_most("ranks quiet and drained", cut_s, "s", 0.1),
        at_most("checkpoint", second, "ratio", 1.25, peer="writing the same bytes"),
        at_most("checkpoint, seconds after the start", first, "ratio", 1.25, peer="writing the same bytes"),
        Row("bytes of a checkpoint", saved[-1].second.mib, "MiB"),
        Row("restart, until all ranks run", min(each.restart_s for each in saved), "s"),
        at_most("restart, beyond 1.25 times reading the same bytes", beyond_s, "s", 1, peer="reading the same bytes"),
    ]


# --- runs ---


def _run_native(cases: str, num_ranks: int) -> dict[str, float]:
    common = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, _WORKER, cases, "0"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    printed = [rank.communicate(timeout=_PATIENCE_S)[0] for rank in ranks]
    found: dict[str, float] = json.loads(printed[0])
    return found


def _run_calls(*arguments: str) -> dict[str, dict[str, float]]:
    return _run_alone(_RANKS, _CALLS, *arguments)


def _run_turns(cases: str, num_ranks: int) -> dict[str, dict[str, float]]:
    return _run_alone(num_ranks, _WORKER, cases, "turns")


def _run_alone(num_ranks: int, *command: str) -> dict[str, dict[str, float]]:
    """What a carried program says that compares itself with torch alone."""
    with tempfile.TemporaryDirectory() as folder:
        leader = _carry(Path(folder) / "job", num_ranks, *command)
        found: dict[str, dict[str, float]] = json.loads(leader.communicate(timeout=_PATIENCE_S)[0])
    return found


def _run_carried(cases: str, num_ranks: int, *, saves: bool) -> tuple[dict[str, float], list[_Saved]]:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        leader = _carry(job, num_ranks, _WORKER, cases, str(_PATIENCE_S if saves else 0))
        assert leader.stdout is not None
        found = json.loads(leader.stdout.readline())
        saved = [_save_and_restart(job, leader)] if saves else []
        leader.communicate(timeout=_PATIENCE_S)
    return found, saved


def _run_growth(num_ranks: int, num_cuts: int) -> list[float]:
    """Seconds that the groups of a program took to grow again, after each of so many checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        leader = _carry(job, num_ranks, _GROWTH, str(num_cuts))
        assert leader.stdout is not None
        leader.stdout.readline()
        for _ in range(num_cuts):
            _take_checkpoint(job)
        found: list[float] = json.loads(leader.communicate(timeout=_PATIENCE_S)[0])
    return found


def _carry(job: Path, num_ranks: int, *command: str) -> subprocess.Popen[str]:
    return _lead("run", "--nproc-per-node", str(num_ranks), "--job", str(job), "--interface", "lo", *command)


def _lead(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*_REMESH, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _save_and_restart(job: Path, leader: subprocess.Popen[str]) -> _Saved:
    first, second = _take_checkpoint(job), _take_checkpoint(job, "--stop")
    leader.communicate(timeout=_PATIENCE_S)
    written_s = _write_plainly(job.parent / "plain", int(second.mib))
    start_s = time.monotonic()
    again = _lead("restart", str(job))
    while JobFolder(job).read_state().state != "running":
        assert again.poll() is None
        time.sleep(_PAUSE_S)
    restart_s = time.monotonic() - start_s
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=_PATIENCE_S)
    files = [path for path in (job / "images" / "000002").rglob("*") if path.is_file()]
    read_s = min(_read_plainly(files, flags) for flags in (0, os.O_DIRECT))
    return _Saved(first, second, restart_s, written_s, read_s)


def _take_checkpoint(job: Path, *options: str) -> _Checkpoint:
    asked = subprocess.run([*_REMESH, "checkpoint", str(job), *options], capture_output=True, text=True, check=True)
    told = re.search(r"([\d.]+) MiB in ([\d.]+) s \(cut after ([\d.]+) s\)", asked.stdout)
    assert told is not None, asked.stdout
    return _Checkpoint(*map(float, told.groups()))


def _write_plainly(path: Path, mib: int) -> float:
    """Seconds for as many bytes by one process, flushed to the disk."""
    data: Any = os.urandom(_CHUNK_BYTES)
    start_s = time.monotonic()
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - start_s


def _read_plainly(paths: Sequence[Path], flags: int) -> float:
    """Seconds until one process has these files from the disk, opened with ``flags`` where a file can be."""
    room = make_buffer(_CHUNK_BYTES)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    start_s = time.monotonic()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | flags)
        while os.readv(descriptor, [room]):
            pass
        os.close(descriptor)
    return time.monotonic() - start_s
