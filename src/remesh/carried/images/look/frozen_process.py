"""Frozen process: all of its threads seized and interrupted (ptrace), until no new ones appear."""

from __future__ import annotations

import contextlib
import functools
from typing import Final

from remesh.foundation.errors import ConfigError, PeerError
from remesh.foundation.linux.calls import is_gone
from remesh.foundation.linux.proc_text import Area
from remesh.foundation.linux.procfs import inner_id, read_areas, thread_ids
from remesh.foundation.linux.ptrace import Tracee, find_instruction

_MAX_LISTINGS: Final = 100
"""Limit of looks at a process: one that makes threads faster than they are seized is given up then."""
_SCRATCH_BYTES: Final = 8192
_READ_WRITE: Final = 0x3
_PRIVATE_ANONYMOUS: Final = 0x22


class FrozenProcess:
    """A process all of whose threads are stopped."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.tracees: list[Tracee] = []  # the leader first
        self._prepared = False
        self._scratch = 0
        self._areas: list[Area] = []

    @functools.cached_property
    def inner_pid(self) -> int:
        """The id of the process in its own namespace."""
        return inner_id(self.pid, self.pid)

    @property
    def leader(self) -> Tracee:
        return self.tracees[0]

    @property
    def areas(self) -> list[Area]:
        """The memory map, read once: it does not change while the process stands, except by `prepare_calls`.

        The first read must come before that.
        """
        if not self._areas:
            self._areas = read_areas(self.pid)
        return self._areas

    def stop_threads(self) -> None:
        """Seize and stop every thread there is."""
        for _ in range(_MAX_LISTINGS):
            held = {tracee.tid for tracee in self.tracees}
            new = [tid for tid in thread_ids(self.pid) if tid not in held]
            if not new:
                return
            for tid in new:
                tracee = Tracee(tid)
                try:
                    tracee.seize()
                    tracee.interrupt()
                except (OSError, PeerError) as error:
                    if tid != self.pid and (isinstance(error, PeerError) or is_gone(error)):
                        continue  # this thread ended just now
                    raise
                self.tracees.append(tracee)
        raise PeerError(f"freezing process {self.pid}: new threads appeared {_MAX_LISTINGS} times; try again")

    def prepare_calls(self) -> int:
        """Get every thread ready for injected calls; returns the address of scratch memory in the process, of 8 KiB."""
        if self._prepared:
            return self._scratch
        address = self._find_instruction()  # reads the memory map, if that is not read yet
        for tracee in self.tracees:
            tracee.prepare(address)
        self._prepared = True
        self._scratch = self.leader.call("mmap", 0, _SCRATCH_BYTES, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        return self._scratch

    def finish_calls(self) -> None:
        """Put every thread back to where it was; there may be calls again after another `prepare_calls`."""
        if not self._prepared:
            return
        if self._scratch:
            self.leader.call("munmap", self._scratch, _SCRATCH_BYTES)
            self._scratch = 0
        for tracee in self.tracees:
            tracee.settle()
        self._prepared = False

    def _find_instruction(self) -> int:
        areas = [area for area in self.areas if "x" in area.protection and area.path != "[vsyscall]"]
        for area in sorted(areas, key=lambda area: area.path != "[vdso]"):
            found = find_instruction(self.leader.read, area.start, area.end)
            if found is not None:
                return found
        raise ConfigError(
            f"dumping process {self.pid}: no system call instruction was found in its memory; this program cannot be "
            "imaged"
        )

    def thaw(self) -> None:
        """Let the process run on exactly where it was; if it was killed, reap it. Does nothing the second time."""
        with contextlib.suppress(OSError, PeerError):  # it was killed
            self.finish_calls()
        killed = []
        for tracee in self.tracees:
            tracee.close()
            if not tracee.detach():
                killed.append(tracee)
        self.tracees = killed
        self.bury()

    def bury(self) -> None:
        """Reap the threads of the killed process, or they would never go.

        The tracer of a thread must wait for its end; until then no process is notified that this one has ended.
        """
        for tracee in reversed(self.tracees):
            tracee.close()
            tracee.wait_until_gone()
        self.tracees = []
