"""Watches of epoll instances: captured, and registered again at restore.

An instance knows an open file together with the descriptor number of the process that registered it. So only a process
that has both can register it again; where no process has them any more, the image is refused. Source: epoll(7),
kcmp(2).
"""

from __future__ import annotations

import array
import re
from collections.abc import Iterator, Sequence
from typing import Final

from remesh.carried.images.form.kinds import ImageRefusal, NotImageable
from remesh.carried.images.form.tree_format import PollWatch
from remesh.carried.images.look.frozen_process import FrozenProcess
from remesh.foundation.linux.calls import system_call
from remesh.foundation.linux.proc_text import Descriptor
from remesh.foundation.linux.ptrace import Tracee

_KCMP_EPOLL_TFD: Final = 7
_ADD: Final = 1
_FORM: Final = re.compile(r"(\d+) +events: +([0-9a-f]+) +data: +([0-9a-f]+) .*")


def watches_of(pid: int, descriptor: Descriptor, processes: Sequence[FrozenProcess]) -> Iterator[PollWatch]:
    """Find what the epoll instance behind a descriptor of process ``pid`` watches; it and its relatives are frozen.

    Raises `NotImageable` when it looks at what no process that has it can ask for again.
    """
    process = next((each for each in processes if each.pid == pid), None)
    seen: dict[int, int] = {}
    for name, text in descriptor.info:
        match = _FORM.fullmatch(text) if name == "tfd" else None
        if match is None:
            continue
        number, events, data = int(match[1]), int(match[2], 16), int(match[3], 16)
        at = seen[number] = seen.get(number, -1) + 1
        if process is None or not _is_the_same(pid, descriptor.number, number, at):
            why = f"an epoll instance that still watches what was descriptor {number} once; close the instance"
            raise NotImageable(f"dumping process {pid}", [ImageRefusal(f"descriptor {descriptor.number}", why)])
        yield PollWatch(process.inner_pid, descriptor.number, number, events, data)


def _is_the_same(pid: int, poll_number: int, number: int, at: int) -> bool:
    """Whether a descriptor leads to what is watched under its number; ``at`` counts those of the same number."""
    slot = array.array("I", [poll_number, number, at])
    try:
        return system_call("kcmp", pid, pid, _KCMP_EPOLL_TFD, number, slot.buffer_info()[0]) == 0
    except OSError:  # it is closed
        return False


def watch_again(leader: Tracee, room: int, watches: Sequence[PollWatch]) -> None:
    """Let a process ask for what its epoll instances looked at; ``room`` is memory of its own."""
    for watch in watches:
        leader.write(room, watch.events.to_bytes(4, "little") + watch.data.to_bytes(8, "little"))
        leader.call("epoll_ctl", watch.poll_number, _ADD, watch.number, room)
