"""Time of a save or a load under each host program, with its own files and with ours.

Each run is a job of its own under torchrun (``script.py``): two ranks save a model and its AdamW, two load it, three
load it, some times in a row. Jobs of the host and of ours take turns; the median counts. The system keeps the files in
memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.report import Row, median_of, spread_of

HOSTS = ("dcp", "lightning", "accelerate")
_SCRIPT = Path(__file__).with_name("script.py")
_TIMEOUT_S = 240


def hosts_here() -> list[str]:
    """The hosts that are installed; the others are left out, by their names."""
    missing = [host for host in HOSTS if host != "dcp" and importlib.util.find_spec(host) is None]
    if missing:
        print(f"saves under {', '.join(missing)}: left out, not installed; make hosts, and run with .hosts/bin/python")
    return [host for host in HOSTS if host not in missing]


def rows_of(host: str, root: Path, mebibytes: int, repeat: int) -> list[Row]:
    """The rows of one host."""
    seconds: dict[str, dict[str, list[float]]] = {"host": {}, "ours": {}}
    for turn in range(repeat):
        for by, found in seconds.items():
            folder = root / f"{host}-{by}-{turn}"
            for act, num_ranks in (("save", 2), ("load", 2), ("load", 3)):
                told = run(host, by, act, num_ranks, folder, mebibytes)
                for name, values in told.items():
                    found.setdefault(f"{name} on {num_ranks}" if act == "load" else name, []).extend(values)
            shutil.rmtree(folder)
    rows = []
    for name, theirs in seconds["host"].items():
        ours = seconds["ours"][name]
        case = f"{host}, {mebibytes} MiB, {name}"
        gain = statistics.median(theirs) / statistics.median(ours)
        rows.append(Row(f"{case}: host over ours", gain, "ratio", peer=host, spread=spread_of(ours)))
        rows += [median_of(f"{case}: host", theirs, "s", peer=host), median_of(f"{case}: ours", ours, "s")]
    return rows


def run(host: str, by: str, act: str, num_ranks: int, folder: Path, mebibytes: int) -> dict[str, list[float]]:
    """One job; seconds of the slowest rank each time, by what was done."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(_SCRIPT), host, by, act, str(folder), str(mebibytes)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{host} by {by}, {act} on {num_ranks} ranks ended with {done.returncode}:\n{done.stderr}")
    told: dict[str, list[float]] = json.loads(lines[-1].removeprefix("told "))
    return told
