"""Image of a rank, taken in the thread that owns MPI, which is the one that holds the program still.

    stand still ── copy outputs ── write the state of the lower half, the image of the program, what the host shares

Loaded at the first round: a job that takes no image does not pay for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from remesh.carried.hosts.imaging import dump_into
from remesh.carried.hosts.outputs import Output
from remesh.carried.hosts.shared_folder import SharedFolder
from remesh.carried.images import Frozen, NotImageable, Upper, check_imageable, freeze, share_hashes
from remesh.carried.mpi.lower.half import MpiLowerHalf
from remesh.carried.mpi.lower.shared_memory import SharedCut, begin_cut, shared_files
from remesh.carried.mpi.lower.state_file import write_state
from remesh.carried.rounds.job_folder import rank_name
from remesh.foundation.errors import Error
from remesh.foundation.files import flush
from remesh.foundation.thread_pool import PooledExecutor
from remesh.wire.messages import Message


class ImageTaker:
    """One rank's images, one after another. Only the thread that owns MPI calls it, since it holds the program."""

    def __init__(
        self,
        room: SharedFolder,
        half: MpiLowerHalf,
        upper: Upper | None,
        outputs: Sequence[Output],
        has_ended: Callable[[], bool],
    ) -> None:
        """``has_ended`` looks whether the program has ended; ``upper`` is None where it had before this stay."""
        self._room = room
        share_hashes(room.hashes)
        self._half = half
        self._upper = upper
        self._outputs = outputs
        self._has_ended = has_ended
        self._frozen: Frozen | None = None
        self._writer = PooledExecutor(1, "state")

    def refusals(self) -> list[str]:
        """The reasons against an image of the program."""
        if self._upper is None or self._has_ended():
            return []
        try:
            return [str(refusal) for refusal in check_imageable(self._upper.pid)]
        except (Error, OSError) as error:
            # A program may end at any moment, this one included, and so may its threads and children.
            return [] if self._has_ended() else [f"what stands against an image could not be seen: {error}"]

    def thaw(self) -> None:
        """Let the program run on, if it is frozen."""
        if self._frozen is not None:
            self._frozen.thaw()
            self._frozen = None

    def take(self, request: Message) -> Message:
        """Write the image that the coordinator asks for; returns the reply. The program stays frozen until `thaw`."""
        folder = Path(request["folder"]) / rank_name(self._room.rank)
        report: dict[str, Any] = {"num_bytes": 0, "seconds": {}, "caught": {}}
        cut: SharedCut | None = None
        try:
            cut = begin_cut(self._room, folder.parent)
            folder.mkdir(mode=0o700)
            self._freeze()
            if cut is not None:
                cut.mark()
            for output in self._outputs:
                output.copy()
            report["outputs"] = [output.copied for output in self._outputs]
            state = self._half.state_bytes()
            report["lower_sha256"] = hashlib.sha256(state).hexdigest()
            report["num_bytes"] = len(state)
            report["has_image"] = self._frozen is not None
            report["caught"] = self._caught()
            written = self._writer.submit(write_state, folder, state)
            copied = self._writer.submit(cut.copy) if cut is not None and cut.is_first else None
            try:
                if self._frozen is not None:
                    self._dump(folder, request, report)
            finally:
                wait([written])
            written.result()
            if copied is not None:
                report["shared"] = copied.result()
            elif cut is not None:
                cut.wait()
            report["num_bytes"] += sum(int(each["num_bytes"]) for each in report.get("shared", {}).values())
            flush(folder)  # the names of both; the coordinator sees to that of the folder
        except (Error, OSError) as error:
            if cut is not None:
                cut.give_up(str(error))
            self.thaw()
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
            return {"problem": str(error), "refused": isinstance(error, NotImageable), "report": report}
        return {"problem": "", "report": report}

    def _freeze(self) -> None:
        """Stop the program, unless it has ended."""
        if self._upper is None or self._has_ended():
            return
        try:
            self._frozen = freeze(self._upper.pid)
        except (Error, OSError):
            if not self._has_ended():
                raise

    def _dump(self, folder: Path, request: Message, report: dict[str, Any]) -> None:
        assert self._frozen is not None
        if shares := shared_files(self._frozen.root.areas):
            report["shares"] = shares
        made = dump_into(self._frozen, folder, request)
        report["num_bytes"] += made.pop("num_bytes")
        report.update(made)

    def _caught(self) -> dict[str, int]:
        """The operations that this cut interrupted: for people, and for the proof that hard cases were met."""
        return {f"ranks {self._half.position().value}": 1, **self._half.caught()}
