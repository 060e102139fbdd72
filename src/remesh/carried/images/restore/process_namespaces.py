"""Namespaces of an upper half (pid, mount, time, user), entered by our init before the program.

Its own *pid* namespace gives it the same process and thread ids wherever it runs; its own *mount* namespace gives it
its channel and logs under the same names; a *time* namespace (at restore) lets its clocks go on from where they were;
a *user* namespace gives a process that is not root the right to make the others.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

from remesh.carried.images.form.kinds import (
    ARENA_PATH,
    CHANNEL_PATH,
    SHARED_PATH,
    SITE_PATH,
    STDERR_PATH,
    STDOUT_PATH,
    Site,
)
from remesh.foundation.linux import calls

_LAST_PID: Final = "/proc/sys/kernel/ns_last_pid"


def leave_for_new_namespaces() -> None:
    """Leave for new pid and mount namespaces, and a user namespace unless this process is root. Children enter them."""
    flags = calls.NEW_PID | calls.NEW_MOUNTS
    if os.geteuid() == 0:
        calls.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    calls.unshare(flags | calls.NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def mount_site(site: Site) -> None:
    """Mount, in the new namespaces, a ``/proc`` of their own, and the channel and logs under their fixed names.

    `SITE_PATH` must be a folder already; what is in it is hidden here.
    """
    calls.mount("none", "/", None, calls.MS_REC | calls.MS_PRIVATE)
    calls.mount("proc", "/proc", "proc", calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC)
    bound = [(site.channel_file, CHANNEL_PATH), (site.stdout_file, STDOUT_PATH), (site.stderr_file, STDERR_PATH)]
    if site.arena_file:
        bound.append((site.arena_file, ARENA_PATH))
    if site.shared_folder:
        bound.append((site.shared_folder, SHARED_PATH))
    # The sources may stand in a folder that the mount below hides, so they are held open.
    sources = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source, _ in bound]
    calls.mount("remesh", SITE_PATH, "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "mode=0700,size=64k")
    for source, (_, target) in zip(sources, bound, strict=True):
        if target == SHARED_PATH:
            Path(target).mkdir(mode=0o700)
        else:
            Path(target).touch(mode=0o600)
        calls.mount(f"/proc/self/fd/{source}", target, None, calls.MS_BIND)
        os.close(source)


def leave_group() -> None:
    """Put this process out of reach of signals for its parent's group.

    It stays in one session with the lower half: the kernel divides cores among sessions, and the two halves are to take
    turns on theirs.
    """
    os.setpgid(0, 0)


def forget_signal_actions() -> None:
    """Reset signal actions in a child before it executes a program, which would inherit ignored signals."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def choose_next_pid(pid: int) -> None:
    """Let the next process or thread of this pid namespace have a certain id. No race: no other process is in it."""
    Path(_LAST_PID).write_text(str(pid - 1))
