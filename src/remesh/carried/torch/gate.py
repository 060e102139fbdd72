"""Gate before a process's groups: when a thread of the program may communicate, and what it has entered.

    open       everything passes                                           the program's ordinary life
    holding    collectives pass up to their targets, the rest passes       waves of the collective clock
    closed     nothing passes, and no completion is delivered          drain, shed, image, grow

A collective is counted in its group's *tally* when it is entered, and stands there until it has ended. Other
communication (a message, a request to the store) is not counted here, but *passes*: a gate that closes waits until no
thread is passing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remesh.foundation.errors import ConfigError


class Entrant:
    """A collective on its way through the gate: first its call, then what is left to wait for."""

    number = 0
    """Its number in its tally, from 1 on."""
    is_inside = True
    """Whether the call has not returned."""

    @property
    def can_begin_anew(self) -> bool:
        """Whether a cut need not wait for its end; known once the call has returned."""
        return False

    @property
    def is_waited_for(self) -> bool:
        """Whether some thread waits for the end."""
        return True

    def settle(self) -> bool:
        """Whether it has ended; does not wait."""
        return False

    def wait_aside(self) -> None:
        """Have a thread of Remesh wait for the end, unless another thread does."""


@dataclass(slots=True)
class Tally:
    """The collectives of one process group."""

    key: str
    """The same text on all members, and on no other group of the job."""
    entered: int = 0
    """Number of collectives entered since the program's start; the building of the group is the first one."""
    under_way: dict[Any, None] = field(default_factory=dict)
    """Those that have not ended, in their order; on the short way, what stands for one. Who ends one takes it out
    without the gate's lock."""


class Gate:
    """The gate of one process; threads of the program go through, the control thread turns it."""

    def __init__(self) -> None:
        # Taken as it is by what every collective calls: a condition takes twice as long.
        self.lock = threading.Lock()
        """That of `changed`."""
        self.changed = threading.Condition(self.lock)
        """Notified whenever more may pass than before; its lock guards all fields below."""
        self.tallies: dict[str, Tally] = {}
        """By key."""
        self.num_passing = 0
        """Number of calls of other kinds that have not returned."""
        self.is_closed = False
        self.is_open = True
        """Whether the gate is neither holding nor closed."""
        self._targets: Mapping[str, int] | None = None
        self._held: dict[int, str] = {}
        """The threads that wait for a target, each with its key."""

    def add_tally(self, key: str) -> Tally:
        """Add the tally of a group that is about to be made."""
        with self.lock:
            tally = self.tallies[key] = Tally(key)
        return tally

    def enter(self, tally: Tally, entrant: Entrant) -> None:
        """Wait until the collective may be entered, and count it."""
        with self.lock:
            if not self.is_open:
                self._wait_for(tally)
            tally.entered = entrant.number = tally.entered + 1
            tally.under_way[entrant] = None

    def leave(self, tally: Tally, entrant: Entrant, *, was_begun: bool) -> None:
        """Note that nothing is left to wait for; a collective that the library refused does not count as entered."""
        with self.lock:
            del tally.under_way[entrant]
            if not was_begun:
                tally.entered -= 1

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
        """The number up to which collectives pass, as last set; the caller holds the lock."""
        return 0 if self._targets is None else self._targets.get(key, 0)

    def held_keys(self) -> list[str]:
        """The keys at which threads wait for a target; the caller holds the lock."""
        return sorted(set(self._held.values()))

    def _wait_for(self, tally: Tally) -> None:
        me = threading.get_ident()
        while not self._may_enter(tally):
            self._held[me] = tally.key
            self.changed.wait()
        self._held.pop(me, None)

    def _may_enter(self, tally: Tally) -> bool:
        if self.is_open:
            return True
        assert self._targets is not None
        return not self.is_closed and tally.entered < self._targets.get(tally.key, 0)

    def _wait_until_open(self) -> None:
        while self.is_closed:
            self.changed.wait()
