"""When may a thread of the program communicate, and what has it entered? One gate stands before a process's groups.

    open       everything passes                                           the program's ordinary life
    holding    collectives pass up to their targets, the rest passes       waves of the collective clock
    closed     nothing passes, and nothing that has ended is told          drain, shed, image, grow

A collective is counted by its group's *key* when it is entered. Other communication (a message, a request to the store)
is not counted here, but *passes*: a gate that closes waits until no thread is passing.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

from remesh.errors import ConfigError


class Gate:
    """The gate of one process; threads of the program go through, the control thread turns it."""

    def __init__(self) -> None:
        # Taken as it is by what every collective calls: a condition takes twice as long.
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        """Notified whenever more may pass than before; its lock guards all fields below."""
        self.entered: dict[str, int] = defaultdict(int)
        """Number of collectives entered since the program's start, by key; the building of a group is its first one."""
        self.inside: dict[str, int] = defaultdict(int)
        """Number of calls of collectives that have not returned, by key."""
        self.num_passing = 0
        """Number of calls of other kinds that have not returned."""
        self.is_closed = False
        self.is_open = True
        """Whether the gate is neither holding nor closed."""
        self._targets: Mapping[str, int] | None = None
        self._held: dict[int, str] = {}
        """The threads that wait for a target, each with its key."""

    def enter(self, key: str) -> int:
        """Wait until the collective may be entered, count it, and return its number; `leave` follows."""
        with self._lock:
            if not self.is_open:
                self._wait_for(key)
            self.inside[key] += 1
            self.entered[key] += 1
            return self.entered[key]

    def leave(self, key: str, *, was_begun: bool = True) -> None:
        """Say that the call has returned; a collective that the library refused does not count as entered."""
        with self._lock:
            self.inside[key] -= 1
            if not was_begun:
                self.entered[key] -= 1

    def begin_passing(self) -> None:
        """Wait until communication that is not counted may begin; `end_passing` follows."""
        with self.changed:
            self._wait_until_open()
            self.num_passing += 1

    def end_passing(self) -> None:
        """End what `begin_passing` began."""
        with self.changed:
            self.num_passing -= 1

    def wait_until_open(self) -> None:
        """Return once the gate is not closed."""
        with self.changed:
            self._wait_until_open()

    # --- for the control thread ---

    def hold(self, targets: Mapping[str, int]) -> None:
        """Let collectives pass up to their targets; a key without one stays where it is."""
        with self.changed:
            # Who is held stays noted until its thread has passed: what is asked next is answered before that can run.
            self._targets, self.is_open = dict(targets), False
            self.changed.notify_all()

    def close(self) -> None:
        """Let nothing pass."""
        with self.changed:
            if self._targets is None:
                raise ConfigError("closing a gate that holds nothing: the waves of a clock come first")
            self.is_closed, self.is_open = True, False

    def open(self) -> None:
        """Let everything pass."""
        with self.changed:
            self._targets, self.is_closed, self.is_open = None, False, True
            self._held.clear()
            self.changed.notify_all()

    def target_of(self, key: str) -> int:
        """The number up to which collectives pass, as last told; the caller holds the lock."""
        return 0 if self._targets is None else self._targets.get(key, 0)

    def held_keys(self) -> list[str]:
        """The keys at which threads wait for a target; the caller holds the lock."""
        return sorted(set(self._held.values()))

    def _wait_for(self, key: str) -> None:
        me = threading.get_ident()
        while not self._may_enter(key):
            self._held[me] = key
            self.changed.wait()
        self._held.pop(me, None)

    def _may_enter(self, key: str) -> bool:
        if self.is_open:
            return True
        assert self._targets is not None
        return not self.is_closed and self.entered.get(key, 0) < self._targets.get(key, 0)

    def _wait_until_open(self) -> None:
        while self.is_closed:
            self.changed.wait()
