"""A lower half with an upper half and nothing else: no images, no coordinator, no rights needed.

``mpiexec -n N python lower_alone.py [--renew SECONDS] program.py ...`` runs a program on the substitute mpi4py. With
``--renew`` every so often all ranks make their lower halves quiet, write their state, release them, and go on with new
ones made from the state, while the program runs on: what a restart does, without an image.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mpi4py
from mpi4py import MPI

import remesh
from remesh.transparent.channel import Channel
from remesh.transparent.lower.half import LowerHalf, Where

_FOREIGN = ("OMPI_", "PMIX", "PMI_", "PRTE", "MPI", "I_MPI", "HYDRA", "FI_", "UCX")
_ROUND_S = 0.005


def environment(channel: str) -> dict[str, str]:
    """What the program sees: no launcher, our mpi4py first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    package = Path(remesh.__file__).parent
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(package / "transparent" / "substitute"), str(package.parent)]),
        "REMESH_CHANNEL": channel,
        "REMESH_MPI4PY": str(Path(mpi4py.__file__).parent),
    }


def made_quiet(half: LowerHalf) -> None:
    """The collective clock, then the drain, in lockstep over all ranks."""
    half.hold(half.counters().entered)
    while True:
        half.serve_once(_ROUND_S)
        position, entered = half.position(), dict(half.counters().entered)
        everybody = MPI.COMM_WORLD.allgather(entered)
        targets: dict[int, int] = {}
        for counts in everybody:
            for comm, count in counts.items():
                targets[comm] = max(targets.get(comm, 0), count)
        behind = [comm for comm, target in targets.items() if half.members(comm) and entered.get(comm, 0) < target]
        # Held at one communicator while another's target needs this rank: all members go one further on the first.
        over = [(comm, entered.get(comm, 0) + 1) for comm in position.communicators] if behind else []
        for comm, target in (pair for some in MPI.COMM_WORLD.allgather(over) for pair in some):
            targets[comm] = max(targets.get(comm, 0), target)
        half.hold(targets)
        settled = not behind and position.where is not Where.INSIDE
        if all(MPI.COMM_WORLD.allgather(settled and not over)):
            break
    half.close()
    while True:
        half.drain_progress()
        counters = half.counters()
        sent = MPI.COMM_WORLD.alltoall(counters.sent)
        done = half.quiet() and tuple(sent) == counters.received
        if all(MPI.COMM_WORLD.allgather(done)):
            return


def main() -> int:
    """Run the program; its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--renew", type=float, default=0.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    num_renewed = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="remesh-test-") as folder:
        channel = Channel.create(f"{folder}/channel")
        half = LowerHalf(MPI, channel)
        python = os.environ.get("UPPER_PYTHON", sys.executable)
        program = subprocess.Popen([python, *options.command], env=environment(f"{folder}/channel"))
        half.attach(program.pid)
        due_s = time.monotonic() + options.renew
        ended = False
        while not ended:
            half.serve_once(_ROUND_S if options.renew else 0.05)
            if half.abort_code is not None:
                program.kill()
                MPI.COMM_WORLD.Abort(half.abort_code)
            ended = program.poll() is not None
            if options.renew:
                ended, due = (
                    all(MPI.COMM_WORLD.allgather(ended)),
                    MPI.COMM_WORLD.bcast(time.monotonic() >= due_s),
                )
                if due and not ended:
                    made_quiet(half)
                    data = half.state_bytes()
                    half.release()
                    half = LowerHalf.from_state(data, MPI, channel)
                    half.rebuild()
                    half.attach(program.pid)
                    num_renewed += 1
                    due_s = time.monotonic() + options.renew
        status = program.wait()
    if status:
        print(f"rank {MPI.COMM_WORLD.rank}: the program ended with {status}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
    MPI.COMM_WORLD.Barrier()
    half.release()
    if options.renew and MPI.COMM_WORLD.rank == 0:
        print(f"renewed {num_renewed} times", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
