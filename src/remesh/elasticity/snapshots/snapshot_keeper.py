"""Agent's side of snapshots: it keeps those of its own workers, and second copies of other nodes' ranks.

A *shelf* holds the two buffers of one rank in one generation. Own workers hand over theirs; the others' are filled
here, by a thread of their own, so that bytes never hold up the agent's decisions; both outlive the worker. Shelves of
earlier generations go once a later one has two whole versions. With b bytes taken per rank a node keeps at most 4 b
bytes for each of its workers, with a rank or on standby (:mod:`remesh.elasticity.model.rank_assignment`), where nodes
with ranks have equally many; and for a moment after a change of mesh as much again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from remesh.elasticity.snapshots.shelves import Key, decide_retired
from remesh.elasticity.snapshots.snapshot_header import read_step
from remesh.elasticity.snapshots.snapshot_memory import SnapshotBuffer
from remesh.elasticity.snapshots.snapshot_transfer import SEND_TIMEOUT_S, Parcel, receive_parcel, report_kept
from remesh.foundation.errors import FormatError, PeerError
from remesh.wire.listening import listen_at
from remesh.wire.messages import Line
from remesh.wire.reception import Reception
from remesh.wire.tls import Tls
from remesh.wire.token import Token

MAX_CONNECTIONS = 64
"""More at once are dropped: a node's workers send one each."""
MAX_SHARE = 0.5
"""A parcel that needs more than this share of the memory that is free now is not kept."""


class SnapshotKeeper:
    """Shelves of one agent. A context manager: entered, it listens; left, all memory is given back."""

    def __init__(self, address: str, token: Token, tls: Tls | None = None) -> None:
        self._token = token
        self._tls = None if tls is None else tls.context(is_server=True)
        self._lock = threading.Lock()
        self._shelves: dict[Key, list[SnapshotBuffer]] = {}
        """Up to two buffers each."""
        listener = listen_at(address)
        self._reception = Reception(listener, self._take, name="keeper", max_callers=MAX_CONNECTIONS)
        self.port = self._reception.port

    def __enter__(self) -> SnapshotKeeper:
        self._reception.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        self._reception.__exit__(*ended)
        with self._lock:
            for shelf in self._shelves.values():
                _clear(shelf)
            self._shelves.clear()

    def adopt(self, key: Key, pid: int, descriptors: list[int]) -> None:
        """Keep the buffers that one of this node's workers made. A worker that is gone already has none."""
        buffers = []
        for descriptor in descriptors[:2]:
            with contextlib.suppress(OSError, ValueError):
                buffers.append(SnapshotBuffer.open(f"/proc/{pid}/fd/{int(descriptor)}"))
        with self._lock:
            _clear(self._shelves.pop(key, []))
            self._shelves[key] = buffers

    def paths(self) -> dict[Key, list[str]]:
        """The paths at which workers of this node find all complete snapshots."""
        pid = os.getpid()
        with self._lock:
            found = {
                key: [buffer.path_in(pid) for buffer in shelf if _step_of(buffer) >= 0]
                for key, shelf in self._shelves.items()
            }
        return {key: paths for key, paths in found.items() if paths}

    def retire(self) -> None:
        """Clear the shelves that no rank can need any more."""
        with self._lock:
            versions = {key: sum(_step_of(one) >= 0 for one in shelf) for key, shelf in self._shelves.items()}
            for key in decide_retired(versions):
                _clear(self._shelves.pop(key))

    # --- what other nodes send ---

    def _take(self, connection: socket.socket) -> None:
        with contextlib.suppress(PeerError, FormatError), self._wrapped(connection) as wrapped:
            line = Line.answer(wrapped, self._token, patience_s=SEND_TIMEOUT_S)
            room: SnapshotBuffer | None = None

            def make_room(parcel: Parcel) -> memoryview | None:
                nonlocal room
                if not 0 < parcel.nbytes <= MAX_SHARE * _free_bytes():
                    return None
                room = self._older_buffer(parcel)
                room.set_complete(False)
                return memoryview(room.memory)[: parcel.nbytes]

            if receive_parcel(line, make_room) and room is not None:
                room.set_complete(True)
                report_kept(line)

    def _wrapped(self, connection: socket.socket) -> socket.socket:
        """The connection, encrypted where the job is; OSError when the other side has no certificate of it."""
        if self._tls is None:
            return connection
        connection.settimeout(SEND_TIMEOUT_S)
        return self._tls.wrap_socket(connection, server_side=True)

    def _older_buffer(self, parcel: Parcel) -> SnapshotBuffer:
        """The buffer to overwrite: one that is not whole, else the one of the earlier step."""
        key = (parcel.generation, parcel.rank)
        with self._lock:
            shelf = self._shelves.setdefault(key, [])
            if any(buffer.nbytes < parcel.nbytes for buffer in shelf):
                _clear(shelf)
            if len(shelf) < 2:
                shelf.append(SnapshotBuffer.make(parcel.nbytes))
                return shelf[-1]
            return min(shelf, key=_step_of)


def _step_of(buffer: SnapshotBuffer) -> int:
    return read_step(memoryview(buffer.memory))


def _clear(shelf: list[SnapshotBuffer]) -> None:
    for buffer in shelf:
        buffer.close()
    shelf.clear()


def _free_bytes() -> int:
    """Memory that the kernel can give now; without a bound where it does not report it."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
