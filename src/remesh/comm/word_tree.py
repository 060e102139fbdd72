"""All-gather of short messages through a flat tree of ranks, in few hops.

Definitions. A tree has a *root*; rank ``(root + i) % size`` stands at *place* ``i``, and below it up to `_FAN_OUT`
others, at the places from ``_FAN_OUT * i + 1`` on. A *hop* is one message that a rank waits for: 2 of them for up to
nine ranks, 4 for up to 73.

Why no collective: gloo's all-gather is a ring. Its steps wait for each other, n - 1 of them, and where ranks share
processors each lasts until the next rank gets one. And a collective would meet those that the caller has under way.

Every receive is posted before its rank sends what lets the other one answer, so no message waits for a receive to be
posted. Only for groups whose point-to-point messages have tags and carry bytes of the CPU (gloo). A message may be
shorter than the buffer that waits for it; its own length stands in front.

A rank that is waited for is named in the log after a minute, and not only when the group's timeout ends. The usual
cause is a call on one rank only (``if rank == 0: remesh.save(...)``). Nothing is given up: a rank may well be late. One
thread looks at what is waited for; a wait that ends soon costs it nothing.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from remesh.foundation.threads import make_thread

_FAN_OUT = 8
_GRACE_S = 60.0
_POLL_S = 5.0
_TOTAL = struct.Struct("<Q")
_ENTRY = struct.Struct("<II")
_GATHER_TAG = 0x5E55
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TreePlace:
    """The parent and the children of a rank in a tree."""

    above: int | None
    """The rank that it speaks to; None for the root."""
    below: tuple[int, ...]
    """The ranks that speak to it."""

    @classmethod
    def of(cls, rank: int, size: int, root: int = 0) -> TreePlace:
        """The place of a rank in the tree of ``size`` ranks with this root.

        >>> TreePlace.of(0, 4), TreePlace.of(3, 4)
        (TreePlace(above=None, below=(1, 2, 3)), TreePlace(above=0, below=()))
        """
        at = (rank - root) % size
        first = _FAN_OUT * at + 1
        below = range(first, min(first + _FAN_OUT, size))
        above = (root + (at - 1) // _FAN_OUT) % size if at else None
        return cls(above, tuple((root + each) % size for each in below))


def gather_words(word: bytes, most_bytes: int, group: dist.ProcessGroup | None, wait: PeerWait) -> list[bytes]:
    """Every rank's word, by rank; none is longer than ``most_bytes``. ``wait`` is kept up to date on who is waited for.

    Called by every rank of the group; blocks until all have called it. Raises RuntimeError when a peer is gone.
    """
    rank, size = _place_in(group)
    place = TreePlace.of(rank, size)
    longest = _TOTAL.size + size * (_ENTRY.size + most_bytes)
    answer = _Mailbox(group, place.above, longest)
    children = [_Mailbox(group, child, longest) for child in place.below]
    words = {rank: word}
    for number, child in enumerate(children):
        wait.peers = place.below[number:]
        words |= dict(_unpack(child.wait()))
    if place.above is not None:
        wait.peers = (place.above,)
        _post(_pack(words), place.above, group).wait()
        packed = answer.wait()
    else:
        packed = _pack(words)
    for work in [_post(packed, child, group) for child in place.below]:
        work.wait()
    by_rank = dict(_unpack(packed))
    return [by_rank[each] for each in range(size)]


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank in a group, and how many there are; torch itself would look for it in the default group first."""
    members = group or dist.group.WORLD
    assert members is not None, "a rank that has peers has a group"
    return members.rank(), members.size()


class _Mailbox:
    """A message that is waited for from one peer; empty when no peer is to send one."""

    def __init__(self, group: dist.ProcessGroup | None, peer: int | None, most_bytes: int) -> None:
        self._buffer = torch.empty(most_bytes if peer is not None else 0, dtype=torch.uint8, device="cpu")
        self._work: Any = None
        if peer is not None:
            self._work = dist.irecv(self._buffer, group=group, group_src=peer, tag=_GATHER_TAG)

    def wait(self) -> bytes:
        """The message, without what may follow it in the buffer."""
        self._work.wait()
        (total,) = _TOTAL.unpack(self._buffer[: _TOTAL.size].numpy().tobytes())
        return self._buffer[:total].numpy().tobytes()


def _post(packed: bytes, peer: int, group: dist.ProcessGroup | None) -> Any:
    packed_bytes = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return dist.isend(packed_bytes, group=group, group_dst=peer, tag=_GATHER_TAG)


def _pack(words: dict[int, bytes]) -> bytes:
    entries = b"".join(_ENTRY.pack(rank, len(word)) + word for rank, word in words.items())
    return _TOTAL.pack(_TOTAL.size + len(entries)) + entries


def _unpack(packed: bytes) -> Iterator[tuple[int, bytes]]:
    at = _TOTAL.size
    while at < len(packed):
        rank, length = _ENTRY.unpack_from(packed, at)
        at += _ENTRY.size
        yield rank, packed[at : at + length]
        at += length


class Farewell:
    """The end of a run, which all ranks reach or none.

    Made by every rank before the run begins, with the same tag, which no other exchange uses, and the same root: best
    is the rank that ends last, for then one hop is left when it ends. No communication.
    """

    def __init__(self, group: dist.ProcessGroup | None, tag: int, root: int) -> None:
        self._group = group
        self._tag = tag
        self._place = TreePlace.of(*_place_in(group), root)
        self._done_below = [self._expect(child) for child in self._place.below]
        self._done_everywhere = [self._expect(self._place.above)] if self._place.above is not None else []

    def wait(self, trouble: bool = False) -> bool:
        """Report that this rank is done, and return when all are: whether any of them has met with ``trouble``.

        Raises RuntimeError when a peer is gone.
        """
        word = torch.tensor([trouble], dtype=torch.uint8, device="cpu")
        for byte, work in self._done_below:
            work.wait()
            word |= byte
        if self._place.above is not None:
            self._send(self._place.above, word).wait()
        for byte, work in self._done_everywhere:
            work.wait()
            word |= byte
        for work in [self._send(child, word) for child in self._place.below]:
            work.wait()
        return bool(word)

    def _expect(self, peer: int) -> tuple[torch.Tensor, Any]:
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        return byte, dist.irecv(byte, group=self._group, group_src=peer, tag=self._tag)

    def _send(self, peer: int, word: torch.Tensor) -> Any:
        return dist.isend(word, group=self._group, group_dst=peer, tag=self._tag)


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
