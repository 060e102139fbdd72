"""The agent's side of snapshots: keeps those of its own workers, and of the seats that it is the keeper of.

A *shelf* holds the two buffers of one rank in one generation. Own workers hand over theirs; the others' are filled
here, by a thread of their own, so that bytes never hold up the agent's decisions; both outlive the worker. Shelves of
earlier generations go once a later one has two whole versions. With b bytes taken per rank a node keeps at most 4 b
bytes for each of its workers, with a seat or standing by (:mod:`remesh.elastic.seats`), where nodes with seats have
equally many; and for a moment after a change of mesh as much again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass, field

from remesh.checksums import crc32
from remesh.comm.tls import Tls
from remesh.comm.token import Token
from remesh.elastic.snapshots.choice import Key, decide_retired
from remesh.elastic.snapshots.form import read_step
from remesh.elastic.snapshots.shared_memory import Buffer
from remesh.elastic.snapshots.wire import KEPT, SEND_TIMEOUT_S, Parcel, receive_parcel
from remesh.errors import PeerError

MAX_CONNECTIONS = 64
"""More at once are dropped: a node's workers send one each."""
MAX_SHARE = 0.5
"""A parcel that needs more than this share of the memory that is free now is not kept."""


@dataclass
class _Shelf:
    buffers: list[Buffer] = field(default_factory=list)


class SnapshotKeeper:
    """Shelves of one agent. A context manager: entered, it listens; left, all memory is given back."""

    def __init__(self, address: str, token: Token, tls: Tls | None = None) -> None:
        self._token = token
        self._tls = None if tls is None else tls.context(is_server=True)
        self._lock = threading.Lock()
        self._shelves: dict[Key, _Shelf] = {}
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._server = socket.create_server((address, 0))
        self.port: int = self._server.getsockname()[1]

    def __enter__(self) -> SnapshotKeeper:
        threading.Thread(target=self._serve, name="remesh-keeper", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            for shelf in self._shelves.values():
                _clear(shelf)
            self._shelves.clear()

    def adopt(self, key: Key, pid: int, descriptors: list[int]) -> None:
        """Keep the buffers that one of this node's workers made. A worker that is gone already has none."""
        buffers = []
        for descriptor in descriptors[:2]:
            with contextlib.suppress(OSError, ValueError):
                buffers.append(Buffer.open(f"/proc/{pid}/fd/{int(descriptor)}"))
        with self._lock:
            _clear(self._shelves.pop(key, _Shelf()))
            self._shelves[key] = _Shelf(buffers)

    def paths(self) -> dict[Key, list[str]]:
        """Where this node's workers find all whole snapshots."""
        pid = os.getpid()
        with self._lock:
            found = {
                key: [buffer.path_in(pid) for buffer in shelf.buffers if _step_of(buffer) >= 0]
                for key, shelf in self._shelves.items()
            }
        return {key: paths for key, paths in found.items() if paths}

    def retire(self) -> None:
        """Clear the shelves that nobody can need any more."""
        with self._lock:
            versions = {key: sum(_step_of(one) >= 0 for one in shelf.buffers) for key, shelf in self._shelves.items()}
            for key in decide_retired(versions):
                _clear(self._shelves.pop(key))

    # --- what other nodes send ---

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._take, args=(connection,), name="remesh-keeper-take", daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        room: list[Buffer] = []

        def make_room(parcel: Parcel) -> memoryview | None:
            if not 0 < parcel.nbytes <= MAX_SHARE * _free_bytes():
                return None
            room.append(self._older_buffer(parcel))
            room[0].set_complete(False)
            return memoryview(room[0].memory)

        try:
            with contextlib.suppress(OSError, PeerError), self._wrapped(connection) as connection:
                parcel = receive_parcel(connection, self._token, make_room)
                if parcel is None:
                    return
                if crc32(memoryview(room[0].memory)[: parcel.nbytes]) == parcel.crc:
                    room[0].set_complete(True)
                    connection.sendall(KEPT)
        finally:
            self._slots.release()

    def _wrapped(self, connection: socket.socket) -> socket.socket:
        """The connection, encrypted where the job is; OSError when the other side has no certificate of it."""
        if self._tls is None:
            return connection
        connection.settimeout(SEND_TIMEOUT_S)
        try:
            return self._tls.wrap_socket(connection, server_side=True)
        except OSError:
            connection.close()
            raise

    def _older_buffer(self, parcel: Parcel) -> Buffer:
        """The buffer to overwrite: one that is not whole, else the one of the earlier step."""
        key = (parcel.generation, parcel.rank)
        with self._lock:
            shelf = self._shelves.setdefault(key, _Shelf())
            if any(buffer.nbytes < parcel.nbytes for buffer in shelf.buffers):
                _clear(shelf)
            if len(shelf.buffers) < 2:
                shelf.buffers.append(Buffer.make(parcel.nbytes))
                return shelf.buffers[-1]
            return min(shelf.buffers, key=_step_of)


def _step_of(buffer: Buffer) -> int:
    return read_step(memoryview(buffer.memory))


def _clear(shelf: _Shelf) -> None:
    for buffer in shelf.buffers:
        buffer.close()
    shelf.buffers.clear()


def _free_bytes() -> int:
    """Memory that the kernel can give now; as much as anybody asks for where it does not tell."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
