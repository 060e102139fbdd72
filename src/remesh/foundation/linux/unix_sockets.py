"""List of AF_UNIX sockets and their connections, from the kernel by sock_diag.

It answers for the network namespace of this process. Source: sock_diag(7), linux/unix_diag.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_NETLINK_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST_DUMP: Final = 0x301
_DONE: Final = 3
_ERROR: Final = 2
_SHOWN: Final = 0x1 | 0x4 | 0x8 | 0x10  # name, peer, connections not accepted yet, lengths of queues
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBHIIIII")
_MESSAGE: Final = struct.Struct("=BBBBIII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_NAME, _PEER, _WAITING, _QUEUES, _SHUTDOWN = 0, 2, 3, 4, 6
_ANY: Final = 0xFFFFFFFF
_ROOM_BYTES: Final = 1 << 18
_LISTENING: Final = 10
_ESTABLISHED: Final = 1


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A socket of this network namespace."""

    inode: int
    kind: int  # SOCK_STREAM, SOCK_DGRAM or SOCK_SEQPACKET
    listens: bool
    is_connected: bool
    name: bytes  # as bound; b"" for none
    peer: int  # inode of the other end; 0 when that is closed, or has not been accepted yet
    waiting: tuple[int, ...]  # of one that listens: inodes of those that connected and are not accepted yet; 0: gone
    backlog: int  # of one that listens
    shutdown: int  # 1: nothing comes any more; 2: nothing can be sent


def unix_sockets() -> dict[int, UnixSocket]:
    """List all sockets of this network namespace, by inode. Raises `OSError` where the kernel does not list them."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as diag:
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ANY, 0, _SHOWN, _ANY, _ANY)
        diag.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        return {each.inode: each for each in _answers(diag)}


def _answers(diag: socket.socket) -> Iterator[UnixSocket]:
    while True:
        data, at = diag.recv(_ROOM_BYTES), 0
        while at < len(data):
            length, kind, *_ = _HEADER.unpack_from(data, at)
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                raise OSError(number, "asking for the sockets of this host")
            yield parse_answer(data[at + _HEADER.size : at + length])
            at += -(-length // 4) * 4


def parse_answer(message: bytes) -> UnixSocket:
    """Parse one ``struct unix_diag_msg`` with its attributes."""
    _, kind, state, _, inode, _, _ = _MESSAGE.unpack_from(message)
    at, found = _MESSAGE.size, {}
    while at < len(message):
        length, name = _ATTRIBUTE.unpack_from(message, at)
        found[name] = message[at + _ATTRIBUTE.size : at + length]
        at += -(-length // 4) * 4
    name, waiting = found.get(_NAME, b""), found.get(_WAITING, b"")
    return UnixSocket(
        inode=inode,
        kind=kind,
        listens=state == _LISTENING,
        is_connected=state == _ESTABLISHED,
        name=name if name.startswith(b"\0") else name.rstrip(b"\0"),
        peer=int.from_bytes(found.get(_PEER, b""), "little"),
        waiting=struct.unpack(f"={len(waiting) // 4}I", waiting),
        backlog=int.from_bytes(found.get(_QUEUES, bytes(8))[4:8], "little"),
        shutdown=int.from_bytes(found.get(_SHUTDOWN, b""), "little"),
    )
