"""Runner of mpi4py's own test suite on the library: ``make mpi4py-suite``, or by hand.

    python -m tests.mpi.mpi4py_suite FOLDER [MODULE ...] [--mpi mpich] [--face mpich] [-n 2] [--native] [--patience 120]
                                     [--out FILE]

FOLDER holds the suite (``test/`` of mpi4py's source). Each module runs as a job of its own, so that one that never
ends takes no other with it. A test has passed when it has on every rank. Prints what failed, by name, and counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import remesh
from remesh.carried.images.look.process_tree import has_ended, tree_of
from remesh.carried.mpi.launch import SHM, Reach, plan_start
from remesh.carried.mpi.mpis import find_mpi
from remesh.foundation.linux.calls import PR_SET_CHILD_SUBREAPER, prctl
from remesh.testbed.quiet_limit import QuietLimit

_HERE = Path(__file__).parent
_LOOK_S = 0.1
_ORDER = ("passed", "skipped", "failed", "started")
"""From good to bad: of several ranks the worst counts; what only started never ended."""

Outcomes = dict[str, tuple[str, str]]
"""By name of a test: its outcome, and why."""


def run_module(module: str, folder: Path, options: argparse.Namespace) -> Outcomes:
    """The outcomes of one module's tests; the module itself when none of them was heard of."""
    mpi = find_mpi(options.mpi)
    alone = () if options.native else (str(_HERE / "lower_alone.py"),)
    program = (*alone, str(_HERE / "programs" / "mpi4py_module.py"), str(folder), module)
    start = plan_start(mpi, SHM, options.n, (), Reach(), (mpi.python, *program))
    # Programs run with this Python, which has NumPy.
    source = str(Path(remesh.__file__).parents[1])
    environment = {**os.environ, **start.environment, "PYTHONPATH": source, "UPPER_PYTHON": sys.executable}
    environment["UPPER_FACE"] = options.face
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(start.command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        limit = QuietLimit(lambda: os.fstat(output.fileno()).st_size, options.patience)
        try:
            while job.poll() is None and not limit.is_over():
                time.sleep(_LOOK_S)
        finally:
            end_descendants()
            job.wait()
        output.seek(0)
        said = output.read()
    return read_outcomes(said) or {module: ("started", said[-300:])}


def end_descendants() -> None:
    """Kill all that this process has started, and what that has: launchers give each rank a group of its own.

    Those whose parent has ended are children of this process, which has asked for them.
    """
    own = os.getpid()
    while living := [pid for pid in tree_of(own) if pid != own and not has_ended(pid)]:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def read_outcomes(said: str) -> Outcomes:
    """What the ranks told, the worst of each test."""
    last: dict[str, list[tuple[str, str]]] = {}
    for line in said.splitlines():
        if not line.startswith('["'):
            continue
        name, outcome, reason = json.loads(line)
        ranks = last.setdefault(name, [])
        # The end of a test takes the place of one of its starts.
        if outcome != "started" and ("started", "") in ranks:
            ranks.remove(("started", ""))
        ranks.append((outcome, reason))
    return {name: max(ranks, key=lambda rank: _ORDER.index(rank[0])) for name, ranks in last.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the modules; 1 when a test failed or never ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--mpi", default="mpich")
    parser.add_argument("--face", default="mpich", choices=("mpich", "openmpi"), help="for which mpi4py was built")
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--native", action="store_true", help="on the real mpi4py, to compare")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds without a word, after which a module is ended"
    )
    parser.add_argument("--out", type=Path, help="a file for all outcomes, as JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    modules = options.modules or sorted(path.stem for path in options.folder.glob("test_*.py"))
    if not modules:
        parser.error(f"no test_*.py in {options.folder}, expected test/ of mpi4py's source")
    found: Outcomes = {}
    for module in modules:
        outcomes = run_module(module, options.folder, options)
        found |= outcomes
        counts = Counter(outcome for outcome, _ in outcomes.values())
        print(module, *(f"{counts[outcome]} {outcome}" for outcome in _ORDER if counts[outcome]), flush=True)
        for name, (outcome, reason) in outcomes.items():
            if outcome in ("failed", "started"):
                print(f"    {outcome}: {name}: {reason.strip().splitlines()[-1] if reason.strip() else 'never ended'}")
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    counts = Counter(outcome for outcome, _ in found.values())
    print("together:", *(f"{counts[outcome]} {outcome}" for outcome in _ORDER))
    return int(bool(counts["failed"] or counts["started"]))


if __name__ == "__main__":
    sys.exit(main())
