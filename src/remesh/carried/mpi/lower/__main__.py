"""``python -m remesh.carried.mpi.lower JOB HOST:PORT [CHECKPOINT OPEN_FILES]``: one rank, started by a launcher.

Runs in the environment of an MPI, which has mpi4py and nothing of ours: neither torch nor NumPy is imported here. The
parts are put together in this order, since each needs what stands before it:

    MPI ── line to the coordinator ── channel ── lower half ── upper half ── loop
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from remesh.carried.hosts.imaging import IMAGE
from remesh.carried.hosts.outputs import open_outputs
from remesh.carried.hosts.process_ids import find_process_id
from remesh.carried.hosts.rank_folder import make_rank_folder
from remesh.carried.hosts.shared_folder import SharedFolder, name_run
from remesh.carried.images import (
    Command,
    OpenFilePolicy,
    Site,
    Starter,
    Upper,
    WrittenFile,
    restore_upper,
    start_upper,
)
from remesh.carried.mpi.arena import FILE, make_arena
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.library.program_faces import library_environment
from remesh.carried.mpi.lower.half import MpiLowerHalf
from remesh.carried.mpi.lower.rank import Ended, RankLoop
from remesh.carried.mpi.lower.shared_memory import bring_back, check_here
from remesh.carried.mpi.lower.state_file import read_state
from remesh.carried.mpi.program_environment import program_environment, rank_variables
from remesh.carried.mpi.together import sharing_ranks
from remesh.carried.rounds.job_folder import Checkpoint, JobFolder, rank_name
from remesh.carried.rounds.leader_line import Control
from remesh.foundation.errors import Error
from remesh.foundation.linux.calls import PR_SET_THP_DISABLE, give_back_memory, prctl
from remesh.foundation.settings import SPIN
from remesh.wire.messages import Line, Message

_POLL_S = 0.001
_TURN_S: Final = 0.0005
"""Time after which the thread that hears the coordinator asks for its turn of Python; a busy engine gives it then."""


@dataclass(frozen=True, slots=True)
class _RankOrder:
    """What the leader tells a rank in its command."""

    folder: JobFolder
    coordinator: str
    """Host and port."""
    checkpoint: int | None = None
    """The checkpoint that it comes back from; None: it begins."""
    open_files: OpenFilePolicy = OpenFilePolicy.TRUNCATE

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Read the words of the command, which the leader alone writes: no parser of options is loaded for them."""
        job, coordinator, *restart = words
        folder = JobFolder(Path(job))
        if not restart:
            return cls(folder, coordinator)
        checkpoint, open_files = restart
        return cls(folder, coordinator, int(checkpoint), OpenFilePolicy(open_files))


def main(words: Sequence[str]) -> int:
    """Run a rank until the job ends; returns the exit status of the process."""
    order = _RankOrder.read(words)
    starter = Starter.make()  # before MPI, which has threads
    _stay_small()
    sys.setswitchinterval(_TURN_S)
    began_s = time.monotonic()
    mpi = _start_mpi()
    rank = mpi.COMM_WORLD.Get_rank()
    seconds = {"mpi_init": time.monotonic() - began_s}
    host, _, port = order.coordinator.rpartition(":")
    try:
        line = Line.connect([(host, int(port))], order.folder.read_token(), f"starting rank {rank}")
    except Error as error:
        # To leave in the ordinary way would finalise MPI, and wait for ranks that may be gone.
        sys.stderr.write(f"remesh: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    hello = {"type": "hello", "rank": rank, "size": mpi.COMM_WORLD.Get_size(), "pid": os.getpid()}
    library = mpi.Get_library_version().split("\n")[0].strip(" \0")
    line.send({**hello, "host": socket.gethostname(), "made_by": {"mpi": library}})
    rooms = contextlib.ExitStack()
    try:
        loop = _put_together(mpi, order, rooms, starter, (line, seconds))
        loop.run()
        loop.leave()
        mpi.Finalize()
    except Ended:
        # Finalising would wait for ranks that may be gone.
        rooms.close()
        os._exit(1)
    except BaseException as error:
        line.send({"type": "failed", "cause": f"{type(error).__name__}: {error}"})
        with contextlib.suppress(OSError), (order.folder.logs / "events.log").open("a") as log:
            log.write(f"rank {rank}: {traceback.format_exc()}")
        if isinstance(error, Error):
            sys.stderr.write(f"remesh: {error}\n")
        else:
            traceback.print_exc()
        sys.stderr.flush()
        rooms.close()
        os._exit(1)
    finally:
        rooms.close()
    line.close()
    return 0


def _stay_small() -> None:
    """Do without huge pages. They are for the program's buffers; MPIs ask for them for tables that they hardly fill.

    The program's process was made before, and keeps them.
    """
    with contextlib.suppress(OSError):  # a kernel without huge pages
        prctl(PR_SET_THP_DISABLE, 1)


def _start_mpi() -> Any:
    # MPI starts when mpi4py.MPI is imported: not before the arguments have been read.
    settings = importlib.import_module("mpi4py").rc
    settings.thread_level = "funneled"
    return importlib.import_module("mpi4py.MPI")


def _put_together(
    mpi: Any,
    order: _RankOrder,
    rooms: contextlib.ExitStack,
    starter: Starter,
    told: tuple[Line, dict[str, float]],
) -> RankLoop:
    (line, seconds), folder = told, order.folder
    rank = mpi.COMM_WORLD.Get_rank()
    room = make_rank_folder()
    rooms.callback(shutil.rmtree, room, ignore_errors=True)
    shared_folder = SharedFolder.enter(name_run(folder.read_token(), order.coordinator), rank)
    rooms.callback(shared_folder.leave)
    channel_file = room / "channel"
    channel = SharedChannel.create(str(channel_file))
    outputs = open_outputs(folder.logs, rank)
    arena_file = room / FILE
    arena = make_arena(str(arena_file))
    out, err = (str(output.path) for output in outputs)
    site = Site(str(channel_file), out, err, str(arena_file) if arena else "", str(shared_folder.windows))
    began_s = time.monotonic()
    upper: Upper | None = None
    spinning = SPIN.is_on(folder.read_spec().environment)
    if order.checkpoint is None:
        half = MpiLowerHalf(mpi, channel, arena, spinning=spinning)
        upper = start_upper(_command(folder, rank), site, starter=starter)
    else:
        chosen = folder.checkpoint(order.checkpoint)
        report = chosen.manifest["ranks"][rank_name(rank)]
        state = read_state(chosen.rank_folder(rank), report)
        half = MpiLowerHalf.from_state(state, mpi, channel, arena, spinning=spinning)
        half.rebuild()
        seconds["replay"] = time.monotonic() - began_s
        began_s = time.monotonic()
        for output, length in zip(outputs, report["outputs"], strict=True):
            # The program writes again what it wrote after the checkpoint.
            output.cut(length)
        _bring_back_shared(mpi, shared_folder, chosen)
        sampled = _cut_files(mpi, report, order.open_files)
        if report["has_image"]:
            image = chosen.rank_folder(rank) / IMAGE
            upper = restore_upper(image, site, open_files=None, starter=starter)
            upper.note = "; ".join(filter(None, [upper.note, sampled]))
        else:
            starter.close()
    seconds["upper"] = time.monotonic() - began_s
    if upper is not None:
        half.attach(upper.pid)
    control = Control(line, half.wake)
    loop = RankLoop(shared_folder, half, upper, control, outputs)
    control.start()
    give_back_memory()  # of what only the start needed
    control.send({"type": "ready", "seconds": seconds, "note": "" if upper is None else upper.note})
    return loop


def _bring_back_shared(mpi: Any, room: SharedFolder, chosen: Checkpoint) -> None:
    """Bring back the memory that programs of one host share, before any of them is back."""
    ranks = chosen.manifest["ranks"]
    if sharing_ranks(ranks):
        bring_back(room, chosen.path, ranks)
        _wait_for_all(mpi)
        check_here(room, ranks)


def _cut_files(mpi: Any, report: Message, policy: OpenFilePolicy) -> str:
    """Check the files that the program writes to, then cut them; each once all ranks have come as far.

    No file is cut before all are good, and no program writes before all are cut. Returns a note for the user.
    """
    from remesh.carried.images.form.written_files import (  # noqa: PLC0415  not for ranks that begin
        check_written,
        cut_written,
        tell_sampled,
    )

    files = [WrittenFile(**each) for each in report.get("written_files", ())]
    sampled = check_written(files, policy, "restoring a program")
    _wait_for_all(mpi)
    cut_written(files, policy)
    _wait_for_all(mpi)
    return tell_sampled(sampled)


_MALLOC = {"hugetlb": 1, "mmap_threshold": 32 << 20, "trim_threshold": 64 << 20, "top_pad": 16 << 20}
"""Large buffers on huge pages: to reach a small page of another process costs more than to copy what it holds.

A buffer that malloc maps by itself lies on a huge page only where it contains a whole one. So those of up to 32 MiB
come from the heap, as they do by default once the program has freed one of that size, and the heap grows by 16 MiB.
"""


def _wait_for_all(mpi: Any) -> None:
    """Wait until all ranks have come as far."""
    everybody = mpi.COMM_WORLD.Ibarrier()
    while not everybody.Test():
        time.sleep(_POLL_S)


def _command(folder: JobFolder, rank: int) -> Command:
    spec = folder.read_spec()
    environment = program_environment(spec.environment) | rank_variables(rank, spec.num_ranks)
    found = shutil.which(spec.argv[0], path=environment.get("PATH"))
    environment = library_environment(None if found is None else Path(found), environment)
    environment.setdefault(
        "GLIBC_TUNABLES", ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items())
    )
    pid = find_process_id(rank, spec.num_ranks, folder.read_token())
    command = Command(spec.argv, environment, spec.folder, pid=pid)
    if rank or not spec.input_file:
        return command
    return replace(command, input_file=spec.input_file, input_position=spec.input_position)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
