"""Freezer of a process tree: parents first, until no new process appears.

A frozen process makes no child. A parent that waits for a child to become another program (vfork) stops only after
that, so no child is met that still shares its parent's memory.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final, Self

from remesh.carried.images.look.frozen_process import FrozenProcess
from remesh.carried.images.look.frozen_registry import FROZEN
from remesh.carried.images.look.process_tree import has_ended, is_ending, naming_the_ended, tree_of
from remesh.foundation.errors import ConfigError, PeerError
from remesh.foundation.linux.calls import is_gone

_MAX_LOOKS: Final = 1000
"""Limit of looks at a tree: one that makes processes faster than they are seized is given up then."""
_QUIET_LOOKS: Final = 2
"""Looks in a row that find no new process: a child may change its parent and be missed, but only once."""


class Frozen:
    """A process that is frozen with all of its descendants; a context manager that thaws them.

    Only the thread that froze them may dump or thaw them. If that thread ends, they run on.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.processes: list[FrozenProcess] = []
        """The frozen processes: that of ``pid`` first, parents before their children."""
        self.ended: list[int] = []
        """Ids of the processes that have ended, and are not waited for yet."""
        self._owner = threading.get_ident()
        FROZEN[pid] = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.thaw()

    @property
    def root(self) -> FrozenProcess:
        return self.processes[0]

    def check_owner(self) -> None:
        """Raise `ConfigError` in another thread than the one that froze it: the kernel would refuse every request."""
        if threading.get_ident() != self._owner:
            raise ConfigError(f"dumping process {self.pid}: another thread froze it, expected the thread that dumps it")

    def stop(self) -> None:
        """Seize and stop every process there is."""
        num_quiet = 0
        for _ in range(_MAX_LOOKS):
            held = {process.pid for process in self.processes}
            new = [pid for pid in tree_of(self.pid) if pid not in held and (pid == self.pid or not has_ended(pid))]
            num_quiet = 0 if new else num_quiet + 1
            if num_quiet == _QUIET_LOOKS:
                self._put_in_order()
                return
            for pid in new:
                self._stop(pid)
        raise PeerError(f"freezing process {self.pid}: new processes appeared {_MAX_LOOKS} times; try again")

    def _stop(self, pid: int) -> None:
        process = FrozenProcess(pid)
        self.processes.append(process)
        try:
            process.stop_threads()
        except (OSError, PeerError) as error:
            if pid == self.pid or not (isinstance(error, PeerError) or is_gone(error) or has_ended(pid)):
                raise
            process.thaw()
            self.processes.remove(process)

    def _put_in_order(self) -> None:
        order = tree_of(self.pid)
        self.processes.sort(key=lambda process: order.index(process.pid))
        held = {process.pid for process in self.processes}
        self.ended = [pid for pid in order if pid not in held]

    def thaw(self) -> None:
        """Let all run on exactly where they were; does nothing if they were thawed or killed before."""
        processes, self.processes = self.processes, []
        if not processes:
            return
        self.check_owner()
        FROZEN.pop(self.pid, None)
        for process in reversed(processes):
            process.thaw()

    def thaw_if_killed(self) -> None:
        """Let the others run on if the first process was killed, whose end nobody else is told of before."""
        if self.processes and is_ending(self.pid) and threading.get_ident() == self._owner:
            self.thaw()

    def bury(self) -> None:
        """Reap all threads after the processes were killed: see `FrozenProcess.bury`."""
        for process in reversed(self.processes):
            process.bury()
        self.processes = []


def freeze(pid: int) -> Frozen:
    """Stop a process and all of its descendants at whatever instruction each thread is.

    Raises `ConfigError` when this process may not, `EndedError` when there is no such process, or it ends.
    """
    frozen = Frozen(pid)
    try:
        with naming_the_ended(f"freezing process {pid}", lambda: [pid]):
            frozen.stop()
    except PermissionError as error:
        frozen.thaw()
        raise ConfigError(
            f"freezing process {pid}: the kernel does not let this process trace it ({error.strerror}); another "
            "debugger may hold it, or the right CAP_SYS_PTRACE is needed: `remesh mpi doctor` shows it"
        ) from error
    except BaseException:
        frozen.thaw()
        raise
    return frozen
