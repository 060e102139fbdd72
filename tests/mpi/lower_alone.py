"""A lower half with an upper half and nothing else: no images, no coordinator, no rights needed.

``mpiexec -n N python lower_alone.py [--renew SECONDS] program.py ...`` runs a program on the library. With
``--renew`` every so often all ranks make their lower halves quiet, write their state, release them, and go on with new
ones made from the state, while the program runs on: what a restart does, without an image.
``UPPER_FACE`` in the environment names the face on which a program's mpi4py runs; MPICH's, else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mpi4py
from mpi4py import MPI

from remesh.carried.hosts.rank_folder import make_rank_folder
from remesh.carried.hosts.shared_folder import SharedFolder
from remesh.carried.mpi.arena import FILE, make_arena
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.library.build import BUILT, LIBRARIES
from remesh.carried.mpi.library.program_faces import library_environment
from remesh.carried.mpi.lower.half import MpiLowerHalf
from remesh.carried.mpi.lower.rank import describe_half
from remesh.carried.rounds.drain import is_drained
from remesh.carried.rounds.status import Status

_FOREIGN = ("OMPI_", "PMIX", "PMI_", "PRTE", "MPI", "I_MPI", "HYDRA", "FI_", "UCX")
_ROUND_S = 0.005
_SAYING_BYTES = 1 << 14


def environment(channel: str) -> dict[str, str]:
    """What the program sees: no launcher, and the library in the place of any MPI."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    face = os.environ.get("UPPER_FACE", "mpich")
    return library_environment(None, kept) | {
        "MPI4PY_MPIABI": face,
        "MPI4PY_LIBMPI": str(BUILT / LIBRARIES[face]),
        "PYTHONPATH": str(Path(mpi4py.__file__).parents[1]),
        "REMESH_CHANNEL": channel,
    }


def told(half: MpiLowerHalf, value: Any, *, closed: bool = False) -> list[Any]:
    """What every rank says. This one goes on serving meanwhile: others may be waiting for just that."""
    own = json.dumps(value).encode().ljust(_SAYING_BYTES)
    everybody = bytearray(_SAYING_BYTES * MPI.COMM_WORLD.size)
    request = MPI.COMM_WORLD.Iallgather([own, MPI.BYTE], [everybody, MPI.BYTE])
    while not request.Test():
        if closed:
            half.drain_progress()
        else:
            half.serve_once(0.0005)
    return [json.loads(everybody[at : at + _SAYING_BYTES]) for at in range(0, len(everybody), _SAYING_BYTES)]


def made_quiet(half: MpiLowerHalf) -> None:
    """Close, then the drain, in lockstep over all ranks."""
    half.close()
    before: list[Status] | None = None
    while True:
        half.drain_progress()
        status = describe_half(MPI.COMM_WORLD.rank, half, is_closed=True, has_ended=False)
        wave = [Status.from_json(one) for one in told(half, status.to_json(), closed=True)]
        if is_drained(before, wave)[0]:
            return
        before = wave


def main() -> int:
    """Run the program; its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--renew", type=float, default=0.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    num_renewed = 0
    folder = make_rank_folder()
    stay = MPI.COMM_WORLD.bcast(folder.name)
    shared_folder = SharedFolder.enter(stay, MPI.COMM_WORLD.rank)
    (folder / "shared").symlink_to(shared_folder.windows)
    try:
        channel = SharedChannel.create(f"{folder}/channel")
        arena = make_arena(f"{folder}/{FILE}")
        half = MpiLowerHalf(MPI, channel, arena)
        python = os.environ.get("UPPER_PYTHON", sys.executable)
        # Without one, the command is a program itself.
        program = subprocess.Popen([*filter(None, [python]), *options.command], env=environment(f"{folder}/channel"))
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
                everybody = told(half, [ended, time.monotonic() >= due_s])
                ended = all(one for one, _ in everybody)
                if everybody[0][1] and not ended:
                    made_quiet(half)
                    data = half.state_bytes()
                    half.release()
                    half = MpiLowerHalf.from_state(data, MPI, channel, arena)
                    half.rebuild()
                    half.attach(program.pid)
                    num_renewed += 1
                    due_s = time.monotonic() + options.renew
        status = program.wait()
    finally:
        shutil.rmtree(folder)
        shared_folder.leave()
    if status:
        print(f"rank {MPI.COMM_WORLD.rank}: the program ended with {status}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
    told(half, None)
    half.release()
    if options.renew and MPI.COMM_WORLD.rank == 0:
        print(f"renewed {num_renewed} times", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
