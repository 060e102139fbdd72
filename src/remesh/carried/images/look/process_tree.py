"""Process tree: its members, and their parents, groups and sessions.

A *tree* is a process with its descendants; of an upper half it is everything in its pid namespace but the init, so
those that lost their parent are in it, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from remesh.carried.images.form.family import INIT, Kin
from remesh.carried.images.form.kinds import NotImageable
from remesh.foundation.errors import EndedError, Error
from remesh.foundation.linux.procfs import children_of, family_of, inner_id, read_stat, read_status, thread_ids

_END_TIMEOUT_S: Final = 1.0
_POLL_S: Final = 0.005
_EXIT_CODE: Final = 51  # its place among the fields of /proc/P/stat


def tree_of(pid: int) -> list[int]:
    """Ids of the processes of a tree, ``pid`` first, parents before their children; ended ones too, if not waited for.

    Raises `ProcessLookupError` when there is no such process.
    """
    try:
        parent = int(read_status(pid)["PPid"])
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from None
    siblings = children_of(parent) if parent and _is_init_of_namespace(parent, pid) else []
    return family_of(pid, *(child for child in siblings if child != pid))


def _is_init_of_namespace(parent: int, pid: int) -> bool:
    """Whether ``parent`` is the init of a namespace that ``pid`` is in, and this process is not."""
    try:
        theirs = os.readlink(f"/proc/{pid}/ns/pid")
        inside = theirs == os.readlink(f"/proc/{parent}/ns/pid") != os.readlink("/proc/self/ns/pid")
        return inside and inner_id(parent, parent) == INIT
    except OSError:
        return False


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is a zombie."""
    try:
        return read_status(pid)["State"][0] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_ending(pid: int) -> bool:
    """Whether a process ends, or has ended: all of its threads do. What is stopped does so by SIGKILL only."""
    try:
        return all(_is_thread_ending(pid, tid) for tid in thread_ids(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True


def _is_thread_ending(pid: int, tid: int) -> bool:
    try:
        status = read_status(pid, tid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status["State"][0] in "ZX" or "VmSize" not in status  # its memory goes first


@contextlib.contextmanager
def naming_the_ended(doing: str, pids: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Raise `EndedError` where what fails does so because one of these processes ends: it fails in many ways."""
    try:
        yield
    except (OSError, Error) as error:
        # What is killed refuses some requests a moment before. A refusal is mostly what it says, and is not waited for.
        may_wait = not isinstance(error, NotImageable) or any(_is_thread_ending(pid, pid) for pid in pids())
        deadline_s = time.monotonic() + (_END_TIMEOUT_S if may_wait else 0.0)
        while not (ended := [str(pid) for pid in pids() if is_ending(pid)]):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)
        raise EndedError(f"{doing}: process {', '.join(ended)} has ended, or was killed") from error


def name_of(pid: int) -> str:
    """The name of a process, as it calls itself."""
    try:
        return read_status(pid)["Name"]
    except (FileNotFoundError, ProcessLookupError):
        return "ended"


def kin_of(pids: Sequence[int]) -> list[Kin]:
    """The processes of a tree as relatives, in the same order. `ValueError` when one has a group from outside."""
    inner = {pid: inner_id(pid, pid) for pid in pids}
    return [_kin_of(pid, inner) for pid in pids]


def _kin_of(pid: int, inner: dict[int, int]) -> Kin:
    status = read_status(pid)
    return Kin(
        pid=inner[pid],
        parent=inner.get(int(status["PPid"]), INIT),
        group=int(status["NSpgid"].split()[-1]),
        session=int(status["NSsid"].split()[-1]),
        exit_status=int(read_stat(pid)[_EXIT_CODE]) if has_ended(pid) else None,
        name=status["Name"],
    )
