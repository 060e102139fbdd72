"""What does a process inherit from the one that starts it, besides environment and files? As text, to be compared.

Workers that are forked of a preloaded process have what that had when it started; workers that the agent starts have
what the agent has now. Whoever changed something meanwhile (``prlimit``, ``taskset``, ``os.umask``, a cgroup) must not
find it ignored.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from remesh.foundation.linux.procfs import read_status

_STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"),
    *("Seccomp", "Seccomp_filters", "Cpus_allowed", "Mems_allowed", "SigBlk"),
)
_FILES = ("limits", "oom_score_adj", "coredump_filter", "timerslack_ns")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid_for_children", "time_for_children", "user", "uts")
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored by every Python, and given back by it when it starts a program."""


def read_surroundings() -> dict[str, str]:
    """By name, what a child of the main thread of this process would find."""
    status = read_status(os.getpid())
    found = {name: status.get(name, "") for name in _STATUS}
    for name in _FILES:
        found[name] = _read(f"/proc/self/{name}")
    found["cgroup"] = groups_of(_read("/proc/self/cgroup"))
    for name in _NAMESPACES:
        found[name] = _link(f"/proc/self/ns/{name}")
    place = os.stat(".")
    found |= {
        "folder": f"{place.st_dev}:{place.st_ino}",
        "root": _link("/proc/self/root"),
        "nice": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "scheduler": f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority}",
    }
    return found


def ignored_signals() -> list[int]:
    """The signals that a program which this process starts would ignore.

    They are no part of the surroundings: a forked worker can be given them. A shell lets its background jobs ignore
    SIGINT, until the agent handles it.
    """
    ignored = int(read_status(os.getpid())["SigIgn"], 16)
    # Not every bit is a signal that a program may ask for: libc keeps two for itself.
    settable = sorted(signal.valid_signals() - {*_PYTHONS_OWN, signal.SIGKILL, signal.SIGSTOP})
    return [int(number) for number in settable if ignored >> (number - 1) & 1]


def ignore_signals(ignored: Collection[int]) -> None:
    """Let this process ignore these signals and no others, as if Python had been started so."""
    for number in ignored_signals():
        if number not in ignored:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def groups_of(cgroups: str) -> str:
    """The control groups that a process was put into, from its ``cgroup`` file.

    A hierarchy that somebody mounts brings a line to every process, whose place there is the root: no change to it.

    >>> groups_of("10:name=systemd:/\\n4:memory:/jobs/7\\n0::/\\n")
    'memory:/jobs/7'
    """
    lines = (line.partition(":")[2] for line in cgroups.splitlines())
    return "\n".join(sorted(line for line in lines if not line.endswith(":/")))


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
