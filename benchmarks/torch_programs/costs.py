"""What does carrying a program cost, and what do its checkpoints? Beside torch alone, in turns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Row, at_most, describe_run, header_of, verdict_of
from remesh.comm.free_ports import free_port

_WORKER = str(Path(__file__).with_name("worker.py"))
_PAGE = Path(__file__).parents[2] / "docs" / "torch_programs" / "measured.md"
_REMESH = (sys.executable, "-m", "remesh", "torch")
_PATIENCE_S = 300.0
_RANKS = 2
_CHUNK_BYTES = 1 << 20


def rows(turns: int) -> list[Row]:
    """All cases; each value is the least of its turns."""
    native, carried, rounds = [], [], []
    for _ in range(turns):
        native.append(_run_native())
        found, taken = _run_carried()
        carried.append(found)
        rounds.append(taken)
    names = ("call_s", "step_s")
    least = {name: [min(each[name] for each in some) for some in (native, carried)] for name in names}
    spread = {name: max(each[name] for each in native) / least[name][0] - 1 for name in names}
    taken = min(rounds, key=lambda one: one["total_s"])
    call, step = least["call_s"], least["step_s"]
    return [
        Row("all_reduce of 4 bytes, native", call[0] * 1e6, "us", spread=spread["call_s"]),
        at_most("all_reduce of 4 bytes, added", (call[1] - call[0]) * 1e6, "us", 10, peer="torch alone"),
        Row("step of DDP, 4 M parameters, native", step[0] * 1e3, "ms", spread=spread["step_s"]),
        at_most("step of DDP, 4 M parameters", step[1] / step[0], "ratio", 1.02, peer="torch alone"),
        at_most("ranks quiet and drained", min(one["cut_s"] for one in rounds), "s", 0.1),
        at_most("checkpoint", taken["total_s"] / taken["plain_s"], "ratio", 1.25, peer="writing the same bytes"),
        Row("bytes of a checkpoint, two ranks", taken["mib"], "MiB"),
    ]


def write_page(rows: list[Row]) -> None:
    """The page of the documentation, from these rows."""
    head = header_of(describe_run(None), "python -m benchmarks.torch_programs --page", "the least of interleaved turns")
    lines = [
        "# What carrying programs of torch costs",
        "",
        head,
        "",
        "Native and carried runs of one program take turns on one host, two ranks, gloo over the loopback.",
        "",
        "| case | value | goal | |",
        "|---|---|---|---|",
    ]
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:g}"
        verdict = "" if row.ok is None else verdict_of({"ok": row.ok})
        lines.append(f"| {row.case} | {row.value:.4g} {row.unit} | {goal} | {verdict} |")
    _PAGE.write_text("\n".join(lines) + "\n")


def _run_native() -> dict[str, float]:
    port = free_port()
    common = {
        **os.environ,
        "WORLD_SIZE": str(_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, _WORKER, "0"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    printed = [rank.communicate(timeout=_PATIENCE_S)[0] for rank in ranks]
    found: dict[str, float] = json.loads(printed[0])
    return found


def _run_carried() -> tuple[dict[str, float], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        how = ("--nproc-per-node", str(_RANKS), "--job", str(job), "--interface", "lo")
        leader = subprocess.Popen(
            [*_REMESH, "run", *how, _WORKER, "600"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert leader.stdout is not None
        found = json.loads(leader.stdout.readline())
        asked = subprocess.run([*_REMESH, "checkpoint", str(job), "--stop"], capture_output=True, text=True, check=True)
        leader.communicate(timeout=_PATIENCE_S)
        told = re.search(r"([\d.]+) MiB in ([\d.]+) s \(cut after ([\d.]+) s\)", asked.stdout)
        assert told is not None, asked.stdout
        mib, total_s, cut_s = map(float, told.groups())
        plain_s = _write_plainly(Path(folder) / "plain", int(mib))
    return found, {"mib": mib, "total_s": total_s, "cut_s": cut_s, "plain_s": plain_s}


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
