"""Notice of ranks that others wait for: named in the log after a minute, and not only when a group's timeout ends.

The usual cause is a call on one rank only (``if rank == 0: remesh.save(...)``), for which the others are never there:
they wait in their next collective for this rank. Nothing is given up here, since a rank may well be late. One thread
looks at what is waited for; a wait that ends soon costs it nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from remesh.foundation.threads import make_thread

_GRACE_S = 60.0
_POLL_S = 5.0
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PeerWait:
    """What a thread waits for."""

    doing: str
    rank: int
    since_s: float
    peers: Sequence[int] = ()
    """Ranks that have not answered yet, as the group numbers them."""
    is_named: bool = False


_waits: dict[int, PeerWait] = {}
"""By thread."""
_watching: int | None = None
"""The process whose thread looks; a fork of it has none."""


@contextmanager
def naming_late(doing: str, rank: int) -> Iterator[PeerWait]:
    """Watch a wait for peers, which the block names."""
    global _watching
    if _watching != os.getpid():
        _watching = os.getpid()
        _waits.clear()
        make_thread("late-ranks", _look, daemon=True).start()
    here = threading.get_ident()
    _waits[here] = wait = PeerWait(doing, rank, time.monotonic())
    try:
        yield wait
    finally:
        _waits.pop(here, None)


def _look() -> None:
    while True:
        time.sleep(min(_POLL_S, _GRACE_S))
        for wait in list(_waits.values()):
            waited_s = time.monotonic() - wait.since_s
            if waited_s > _GRACE_S and wait.peers and not wait.is_named:
                wait.is_named = True
                logger.warning("%s", describe_late(wait.doing, wait.rank, wait.peers, waited_s))


def describe_late(doing: str, rank: int, peers: Sequence[int], waited_s: float) -> str:
    """The sentence that names them."""
    return (
        f"{doing}: rank {rank} has waited {waited_s:.0f} s for {describe_ranks(peers)}, or for what they wait for; "
        "every rank of the group makes this call: if yours does it on one rank only, call it on every rank"
    )


def describe_ranks(peers: Sequence[int]) -> str:
    """A few ranks by number.

    >>> describe_ranks([1, 2, 3]), describe_ranks([4])
    ('ranks 1, 2, 3', 'rank 4')
    """
    return f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"
