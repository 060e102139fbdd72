"""Worker's side of snapshots: copy what was chosen into shared memory, and send it on while training goes on.

    boundary of step n     main thread: copy into buffer (n-th snapshot) % 2                        the only pause
                           sending thread: mark it complete; buffer ──> agent of the keeper, which has two of its own
    vote of a later step   "still sending?" is part of the vote: if any rank is, the next snapshot is left out
                           by all, and a rank that could not send the last one tries again

Device memory is copied by the device, as in background saves, and the sending thread waits until it is there. What one
loses is as what could not be sent: older copies stay whole, and no further snapshot is taken.

So on every node the older of two buffers stays whole until all nodes have the newer one. Memory: two buffers of what
this rank takes on its own node, and two on its keeper (:mod:`remesh.elasticity.model.rank_assignment`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from remesh.device.queued_copies import CUDA, Devices, LockedMemory, QueuedCopy
from remesh.elasticity.snapshots.choice import SnapshotChoice
from remesh.elasticity.snapshots.form import SnapshotDescription, TensorEntry, plan_starts, write_description
from remesh.elasticity.snapshots.snapshot_memory import SnapshotBuffer
from remesh.elasticity.snapshots.snapshot_transfer import SEND_TIMEOUT_S, send_parcel
from remesh.elasticity.training_state import HeldState
from remesh.foundation.errors import Error
from remesh.foundation.threads import make_thread
from remesh.layout.from_torch import Piece, dtype_name
from remesh.wire.messages import Line
from remesh.wire.tls import Tls
from remesh.wire.token import Token


@dataclass(frozen=True, slots=True)
class Shelf:
    """The rank of a generation that takes snapshots, and the agent that keeps their second copy."""

    generation: int
    rank: int
    keeper: tuple[str, int] | None
    """Address and port of the agent that keeps the second copy; None when there is no other node."""
    token: Token
    tls: Tls | None = None
    """How its agent is spoken to; None: in the clear."""


class _SnapshotBegun(NamedTuple):
    """A snapshot whose values are in a buffer, or on their way there."""

    buffer: SnapshotBuffer
    arriving: LockedMemory | None
    """What devices are still copying into the buffer, if anything."""
    step: int
    nbytes: int


class SnapshotTaker:
    """One worker's snapshots in one generation. ``tell`` sends a message to the agent, ``log`` writes an event."""

    def __init__(
        self,
        shelf: Shelf,
        tell: Callable[[dict[str, Any]], None],
        log: Callable[..., None],
        devices: Devices = CUDA,
    ) -> None:
        self._shelf = shelf
        self._devices = devices
        self._tell = tell
        self._log = log
        self._buffers: list[SnapshotBuffer] = []
        self._locked: dict[SnapshotBuffer, LockedMemory] = {}
        """The buffers that devices have copied into."""
        self._num_taken = 0
        self._busy = False
        self._unsent: _SnapshotBegun | None = None
        """The last snapshot, if it could not be sent."""
        self._pending: queue.SimpleQueue[_SnapshotBegun | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last snapshot is not yet where it is to be kept."""
        return self._busy

    def send_again(self) -> None:
        """Try once more what could not be sent; nothing otherwise. Its buffer is untouched: no other was begun."""
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            self._pending.put(unsent)

    def take(self, held: HeldState, choice: SnapshotChoice, pid: int) -> float:
        """Copy what was chosen, and begin to send it; seconds that the caller was held up."""
        started_s = time.monotonic()
        snapshot, tensors = _describe(held, choice)
        if not tensors:
            return 0.0
        head = write_description(snapshot)
        nbytes = len(head) + snapshot.data_bytes
        if not self._buffers or self._buffers[0].nbytes < nbytes:
            self._make_buffers(nbytes, pid)
        buffer = self._buffers[self._num_taken % 2]
        self._num_taken += 1
        buffer.set_complete(False)
        buffer.memory[: len(head)] = head
        whole = torch.frombuffer(buffer.memory, dtype=torch.uint8, count=nbytes)
        copies = []
        for entry, tensor in zip(snapshot.entries, tensors, strict=True):
            start = len(head) + entry.start
            part = whole[start : start + entry.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(QueuedCopy(part, tensor.detach()))
        arriving = self._copy(copies, buffer)
        if arriving is None:
            buffer.set_complete(True)
        self._send(_SnapshotBegun(buffer, arriving, snapshot.step, nbytes))
        return time.monotonic() - started_s

    def _copy(self, copies: Sequence[QueuedCopy], buffer: SnapshotBuffer) -> LockedMemory | None:
        """Copy what is on the host, and let devices copy what they hold; where that arrives, if there is any."""
        queued = []
        for copy in copies:
            if copy.tensor.nbytes and self._devices.device_of(copy.tensor) is not None:
                queued.append(copy)
            else:
                copy.into.copy_(copy.tensor)
        if not queued:
            return None
        if buffer not in self._locked:
            self._locked[buffer] = LockedMemory(torch.frombuffer(buffer.memory, dtype=torch.uint8), self._devices)
        self._locked[buffer].begin(queued)
        return self._locked[buffer]

    def close(self) -> None:
        """Stop sending; what is kept stays with the agents."""
        if self._thread is not None:
            # It may still read from a buffer, and closes them when it is through.
            self._pending.put(None)
        else:
            self._close_buffers()

    def _close_buffers(self) -> None:
        self._unsent = None
        self._locked.clear()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _make_buffers(self, nbytes: int, pid: int) -> None:
        self._close_buffers()
        # Room for plain values that grow a little, as counters do.
        self._buffers = [SnapshotBuffer.make(nbytes + 4096) for _ in range(2)]
        self._num_taken = 0
        self._tell(
            {
                "type": "keep",
                "generation": self._shelf.generation,
                "rank": self._shelf.rank,
                "pid": pid,
                "descriptors": [buffer.descriptor for buffer in self._buffers],
            }
        )

    def _send(self, begun: _SnapshotBegun) -> None:
        if self._shelf.keeper is None and begun.arriving is None:
            return
        self._busy = True
        if self._thread is None:
            self._thread = make_thread("snapshots", self._run, daemon=True)
            self._thread.start()
        self._pending.put(begun)

    def _run(self) -> None:
        while (begun := self._pending.get()) is not None:
            started_s = time.monotonic()
            try:
                if begun.arriving is not None:
                    begun.arriving.wait()
                    begun.buffer.set_complete(True)
                if self._shelf.keeper is not None:
                    self._send_now(begun.buffer, begun.nbytes, self._shelf.keeper)
            except (OSError, Error) as error:
                # Older copies stay whole until this one is kept: the rank tries again with the next snapshot. Should
                # the keeper be gone, a new generation has another one.
                self._unsent = begun
                self._log("snapshot-unsent", step=begun.step, reason=f"{type(error).__name__}: {error}")
                continue
            if self._shelf.keeper is not None:
                seconds = time.monotonic() - started_s
                self._log("snapshot-kept", step=begun.step, bytes=begun.nbytes, seconds=seconds)
            self._busy = False
        self._close_buffers()

    def _send_now(self, buffer: SnapshotBuffer, nbytes: int, keeper: tuple[str, int]) -> None:
        shelf = self._shelf
        line = Line.connect(
            [keeper],
            shelf.token,
            "sending it",
            connect_s=SEND_TIMEOUT_S,
            patience_s=SEND_TIMEOUT_S,
            tls=shelf.tls,
        )
        with line, memoryview(buffer.memory)[:nbytes] as data:
            send_parcel(line, shelf.generation, shelf.rank, data)


def _describe(held: HeldState, choice: SnapshotChoice) -> tuple[SnapshotDescription, list[torch.Tensor]]:
    chosen: list[tuple[str, Piece]] = []
    for name, piece in held.pieces.items():
        boxes = choice.boxes.get(name, frozenset())
        shards = tuple(shard for shard in piece.shards if shard.box in boxes)
        # Partial sums are no state of one rank; a step that lacks them is passed over on recovery.
        if shards and piece.partial is None:
            chosen.append((name, Piece(piece.tensor, piece.global_shape, shards)))
    starts = plan_starts([piece.tensor.nbytes for _, piece in chosen])
    entries = tuple(
        TensorEntry(
            name, dtype_name(piece.tensor.dtype), piece.global_shape, tuple(piece.tensor.shape), start, piece.shards
        )
        for (name, piece), start in zip(chosen, starts, strict=True)
    )
    values: Mapping[str, Any] = held.values
    return SnapshotDescription(held.step, held.samples, entries, values, held.line), [
        piece.tensor for _, piece in chosen
    ]
