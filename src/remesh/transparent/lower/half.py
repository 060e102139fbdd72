"""The lower half of one rank: serves the upper half's calls on a real MPI, and can be made quiet, saved and grown again.

One thread owns a :class:`LowerHalf` and calls its methods; only :meth:`LowerHalf.wake` may be called from another. Nothing
here blocks on another rank: whatever waits is a pending entry that :meth:`serve_once` comes back to.

A checkpoint, seen from here::

    hold(targets) ... serve_once() ...   until every rank is quiet about collectives (the clock's rounds)
    close()       ... drain_progress()   until quiet() on every rank and sent == received between every two
    state_bytes()                        beside the image of the upper half
    open(); hold(None)                   to go on; or release() and exit

Restart: ``from_state(data, mpi, channel)``, ``rebuild()``, upper half restored, ``attach(pid)``, ``serve_once()`` ...
A request that the upper half had posted and that had no answer yet is found in the channel and served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from remesh.transparent.channel import Channel


class Where(Enum):
    """What the upper half is doing, as its lower half sees it; with several threads, the last of these that holds."""

    COMPUTING = "computing"
    WAITING = "waiting"
    """In a point-to-point operation or a wait; it stays servable and can be imaged as it is."""
    HELD = "held"
    """Asks for a collective beyond its target; the request is unanswered and has had no effect."""
    INSIDE = "inside"
    """A collective has been entered (or started, if non-blocking) and is not complete; no image now."""
    FINISHED = "finished"
    """The program called Finalize (or ended); it takes part in rounds until all have."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the upper half is, and at which communicators."""

    where: Where
    communicators: tuple[int, ...] = ()
    """Virtual ids: those it is held at (HELD) or inside of (INSIDE); else empty."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What drain and collective clock compare over the ranks."""

    sent: tuple[int, ...]
    """Wire messages handed to MPI for each world rank. Final once every rank is closed and quiet."""
    received: tuple[int, ...]
    """Wire messages taken from each world rank. Invariant over a cut: a.received[b] <= b.sent[a]."""
    entered: Mapping[int, int]
    """Virtual communicator id -> collectives entered. A communicator never used for one may be absent (0)."""


class LowerHalf:
    """Serves one upper half over ``channel`` with the MPI module ``mpi`` (a real, initialised ``mpi4py.MPI``)."""

    def __init__(self, mpi: Any, channel: Channel) -> None:
        """Duplicates the world communicator (all ranks call this)."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, data: bytes, mpi: Any, channel: Channel) -> Self:
        """What :meth:`state_bytes` described, on another MPI; also puts the channel's bytes back.

        Raises:
            FormatError: the bytes are damaged, or belong to another rank or number of ranks.
        """
        raise NotImplementedError

    def attach(self, upper_pid: int) -> None:
        """Tell the process id (as this process sees it) whose memory big payloads are read from and written to."""
        raise NotImplementedError

    def serve_once(self, timeout_s: float) -> None:
        """Take what has arrived from the upper half and from MPI; wait for either at most ``timeout_s``."""
        raise NotImplementedError

    def wake(self) -> None:
        """Make a waiting :meth:`serve_once` return soon. From any thread."""
        raise NotImplementedError

    def counters(self) -> Counters:
        """A snapshot of the counters."""
        raise NotImplementedError

    def members(self, communicator: int) -> tuple[int, ...]:
        """World ranks of a communicator, in its order of ranks; empty if it is not known (yet, or any more)."""
        raise NotImplementedError

    def position(self) -> Position:
        """Where the upper half is now."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether the program has called Finalize."""
        raise NotImplementedError

    @property
    def abort_code(self) -> int | None:
        """The exit status of ``Comm.Abort`` if the program called it: end the job with it."""
        raise NotImplementedError

    def hold(self, targets: Mapping[int, int] | None) -> None:
        """From now on leave requests for a collective beyond its target unanswered; None lets all through again.

        A communicator without a target is held where it is. Targets may be raised by calling again.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Take no more requests of any kind and start no more transfers; those that are running finish."""
        raise NotImplementedError

    def open(self) -> None:
        """Take requests again, after :meth:`close`: the checkpoint is done or given up."""
        raise NotImplementedError

    def drain_progress(self) -> None:
        """Take what has arrived from MPI, without waiting. Between :meth:`close` and :meth:`open`."""
        raise NotImplementedError

    def quiet(self) -> bool:
        """Whether nothing of ours is on its way: no collective entered, every send handed over, no transfer open.

        Once true after :meth:`close` it stays true, and ``counters().sent`` no longer changes; messages may still arrive.
        """
        raise NotImplementedError

    def state_bytes(self) -> bytes:
        """Everything that must outlive this lower half: communicators, requests, queues, channel. Changes nothing.

        Only when closed, quiet, and all messages that were sent have been received. Struct and JSON, no pickle.
        """
        raise NotImplementedError

    def rebuild(self) -> None:
        """Replay the object log. Real communicators are made at their first collective, so this is short."""
        raise NotImplementedError

    def release(self) -> None:
        """Give everything back to MPI, so that it can be finalised. All ranks call this."""
        raise NotImplementedError
