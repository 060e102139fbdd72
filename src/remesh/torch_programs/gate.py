"""When may a thread of the program communicate, and what has it entered? One gate stands before a process's groups.

    open       all passes                                                  the program's ordinary life
    holding    collectives pass up to their targets, all else passes       waves of the collective clock
    closed     nothing passes, and nothing that has ended is told          drain, shed, image, grow

A collective is counted by its group's *key* when it is entered. What else speaks to others (a message, the store) is
not counted here, but *passes*: a closed gate waits until nobody does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from remesh.errors import ConfigError


class Gate:
    """The gate of one process; threads of the program go through, the control thread turns it."""

    def __init__(self) -> None:
        # Taken as it is by what every collective calls: a condition takes twice as long.
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        """Notified whenever more may pass than before; its lock guards all that is below."""
        self.entered: dict[str, int] = {}
        """Collectives by key, from the start of the program on; its building is a group's first one."""
        self.inside: dict[str, int] = {}
        """Calls of collectives that have not come back, by key."""
        self.num_passing = 0
        """Calls of other kinds that have not come back."""
        self.is_closed = False
        self.is_open = True
        """Neither holding nor closed."""
        self._targets: Mapping[str, int] | None = None
        self._held: dict[int, str] = {}
        """Threads that wait for a target, and on which key."""

    def enter(self, key: str) -> int:
        """Count a collective and go into it, as soon as that may be, and return its number; `leave` follows."""
        with self._lock:
            if not self.is_open:
                self._wait_for(key)
            number = self.entered[key] = self.entered.get(key, 0) + 1
            self.inside[key] = self.inside.get(key, 0) + 1
            return number

    def leave(self, key: str, *, was_begun: bool = True) -> None:
        """The call has come back; a collective that was refused by the library was not entered."""
        with self._lock:
            self.inside[key] -= 1
            if not was_begun:
                self.entered[key] -= 1

    def begin_passing(self) -> None:
        """Say something that is not counted, as soon as that may be; `end_passing` follows."""
        with self.changed:
            self._wait_until_open()
            self.num_passing += 1

    def end_passing(self) -> None:
        """It has been said."""
        with self.changed:
            self.num_passing -= 1

    def wait_until_open(self) -> None:
        """Come back once the gate is not closed."""
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
        """Up to which number collectives pass, as was told last; the lock is held by the caller."""
        return 0 if self._targets is None else self._targets.get(key, 0)

    def held_keys(self) -> list[str]:
        """Where threads wait for a target; the lock is held by the caller."""
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
