"""AF_UNIX sockets between the processes of a tree: pairs with queued data, and listeners, carried and remade.

A pair is connected again by ``socketpair``, filled from the other end, and closed at that end if no process had it.
What is on its way may be descriptors, too (SCM_RIGHTS). A listener is bound to its name again. What cannot be done so
is refused by name: a connection that is not accepted yet, a name of a socket for datagrams.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import stat
import termios
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from remesh.carried.images.form.kinds import ImageRefusal, NotImageable
from remesh.carried.images.form.tree_format import SocketPart, SocketState
from remesh.foundation.errors import StorageError
from remesh.foundation.linux.calls import borrow_descriptor
from remesh.foundation.linux.procfs import seen_from_here
from remesh.foundation.linux.unix_sockets import UnixSocket

_SO_PEEK_OFF: Final = 42
_SO_SNDBUFFORCE: Final = 32
_PART_BYTES: Final = 1 << 20
_MAX_DESCRIPTORS: Final = 253  # in one message
_ROOM_WHILE_FILLED: Final = 64 << 20
_OPTIONS: Final = (socket.SO_PASSCRED, socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
_OPTION_BYTES: Final = 16
_SHUTDOWNS: Final = {1: socket.SHUT_RD, 2: socket.SHUT_WR, 3: socket.SHUT_RDWR}


def inode_of(link: str) -> int:
    """The inode of a socket, from its name in /proc."""
    return int(link.removeprefix("socket:[").removesuffix("]"))


def check_socket(what: str, one: UnixSocket | None, inside: set[int]) -> ImageRefusal | None:
    """Find the reason against carrying a socket, if any; ``inside`` are the inodes of the tree's own sockets."""
    if one is None:
        why = "a connection of the program's own; its other end is not in the image: close it first"
        return ImageRefusal(what, why)
    if one.listens:
        if one.kind != socket.SOCK_STREAM or not one.name.startswith((b"/", b"\0")):
            return ImageRefusal(what, "it listens, and not as a stream with an absolute name; images do not hold that")
        if set(one.waiting) - inside:
            return ImageRefusal(what, "a process outside of the image connects to it; try again", is_passing=True)
        return None
    if one.kind != socket.SOCK_STREAM and (one.name or not one.is_connected):
        return ImageRefusal(what, "a socket for datagrams that is not one of a pair; images do not hold it")
    if one.peer and one.peer not in inside:
        return ImageRefusal(what, "a connection whose other end is in a process outside; it is not in the image")
    if not one.is_connected and one.name:
        return ImageRefusal(what, "it has a name and does not listen yet; try again", is_passing=True)
    return None


# --- read ---


def describe_socket(
    holder: tuple[int, int], one: UnixSocket, peer: int, listener: int, take_in: Callable[[int], int]
) -> SocketState:
    """The record of a socket, by one of its descriptors: process and number.

    ``peer`` is the number of the other end, ``listener`` that of one which has not accepted it yet; ``take_in`` makes
    an open file of one that is on its way here.
    """
    pid, number = holder
    held = socket.socket(fileno=borrow_descriptor(pid, number))
    try:
        options = {each: held.getsockopt(socket.SOL_SOCKET, each, _OPTION_BYTES) for each in _OPTIONS}
        parts = tuple(_peek(held, take_in)) if one.is_connected else ()
        send_bytes = held.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        if one.is_connected and not one.peer and not one.shutdown and (listener < 0 or _num_bytes_sent(held)):
            raise _of_a_moment("the other end has not accepted yet what it sent")
    finally:
        held.close()
    mode = 0
    if one.name.startswith(b"/"):
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(seen_from_here(pid, os.fsdecode(one.name))).st_mode)
    return SocketState(
        kind=one.kind,
        listens=one.listens,
        is_connected=one.is_connected,
        name=one.name if one.listens else b"",
        mode=mode,
        backlog=one.backlog,
        peer=peer,
        listener=listener,
        shutdown=one.shutdown,
        send_bytes=send_bytes,
        options=options,
        queue=parts,
    )


def _peek(held: socket.socket, take_in: Callable[[int], int]) -> Iterator[SocketPart]:
    """Peek at what a reader would get, message by message; it stays there."""
    held.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        while True:
            try:
                data, extra, told, _ = held.recvmsg(_PART_BYTES, socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS), flags)
            except BlockingIOError:
                return
            numbers = array.array("i")
            for level, kind, content in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers.frombytes(content[: len(content) - len(content) % 4])
            if not data and not numbers:
                return
            part = SocketPart(data, tuple(take_in(each) for each in numbers))
            if told & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise _of_a_moment(f"a message of more than {_PART_BYTES} bytes is in transit")
            if numbers and held.type == socket.SOCK_STREAM and len(data) > 1:
                # The kernel does not show with which of these bytes: a reader of fewer would lose them.
                raise _of_a_moment("descriptors are on their way behind other bytes")
            yield part
    finally:
        held.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, -1)


def _num_bytes_sent(held: socket.socket) -> int:
    """The number of bytes sent that the peer has not read yet."""
    room = array.array("i", [0])
    fcntl.ioctl(held.fileno(), termios.TIOCOUTQ, room)
    return room[0]


def _of_a_moment(why: str) -> NotImageable:
    refusal = ImageRefusal("a socket between processes", f"{why}; try again", is_passing=True)
    return NotImageable("dumping a socket", [refusal])


# --- made anew ---


def make_sockets(states: Sequence[SocketState]) -> list[tuple[socket.socket, socket.socket | None]]:
    """Make every socket, and the other end of those whose peer no process has, to be closed in the end."""
    made: dict[int, tuple[socket.socket, socket.socket | None]] = {}
    for at, state in enumerate(states):
        if state.listens:
            made[at] = _make_listener(state), None
    for at, state in enumerate(states):
        if at in made:
            continue
        if state.listener >= 0:
            made[at] = socket.socket(socket.AF_UNIX, state.kind), None
            made[at][0].connect(states[state.listener].name)
        elif not state.is_connected:
            made[at] = socket.socket(socket.AF_UNIX, state.kind), None
        else:
            one, other = socket.socketpair(socket.AF_UNIX, state.kind)
            made[at] = one, other if state.peer < 0 else None
            if state.peer >= 0:
                made[state.peer] = other, None
    for state in states:
        if state.name.startswith(b"/") and not state.mode:  # it had lost its name
            os.unlink(state.name)
    return [made[at] for at in range(len(states))]


def _make_listener(state: SocketState) -> socket.socket:
    """Make a socket that listens at its name; one that stands there is of an earlier run and is replaced."""
    made, name = socket.socket(socket.AF_UNIX, state.kind), state.name
    try:
        if name.startswith(b"/"):
            os.makedirs(os.path.dirname(name), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(name).st_mode):
                    os.unlink(name)
        made.bind(name)
        if state.mode:
            os.chmod(name, state.mode)
        made.listen(state.backlog)
    except OSError as error:
        made.close()
        raise StorageError(
            f"restoring a socket that listens at {name!r}: {error.strerror}; free that name, or restart elsewhere"
        ) from error
    return made


def fill_sockets(
    states: Sequence[SocketState], made: Sequence[tuple[socket.socket, socket.socket | None]], files: Sequence[int]
) -> None:
    """Send again what was on its way, with open files as descriptors of this process; and close what was closed."""
    for state, (_, spare) in zip(states, made, strict=True):
        sender = spare if spare is not None else made[state.peer][0] if state.peer >= 0 else None
        if sender is not None and state.queue:
            with contextlib.suppress(PermissionError):
                sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _ROOM_WHILE_FILLED)
            for part in state.queue:
                _send(sender, part, files)
    for state, (one, spare) in zip(states, made, strict=True):
        for option, value in state.options.items():
            one.setsockopt(socket.SOL_SOCKET, option, value)
        with contextlib.suppress(PermissionError):
            one.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, state.send_bytes // 2)
        if state.peer >= 0 and state.shutdown in _SHUTDOWNS:
            one.shutdown(_SHUTDOWNS[state.shutdown])
        if spare is not None:
            spare.close()


def _send(sender: socket.socket, part: SocketPart, files: Sequence[int]) -> None:
    numbers = array.array("i", (files[each] for each in part.files))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if numbers else []
    try:
        num_sent = sender.sendmsg([part.data], rights, socket.MSG_DONTWAIT)
    except BlockingIOError:
        num_sent = 0
    if num_sent != len(part.data):
        raise StorageError(
            f"restoring a socket: {len(part.data)} bytes were in transit, of which {num_sent} fit; "
            "raise net.core.wmem_max, or restore as root"
        )
