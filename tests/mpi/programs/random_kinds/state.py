"""What the steps of a program share: communicators, what was left open, and a digest of all that was got."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

LENGTHS = (
    0,
    1,
    8,
    100,
    2048,
    32767,
    32768,
    32769,
    65536,
    (1 << 19) + 1,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    3 << 20,
)
"""Bytes, around the limits at which a message is carried in another way."""
_COMMON = 9
"""So many of the lengths are short enough to be drawn often."""
LONGEST_OPEN = 15
"""Steps until what was left open is completed, at most; a retired communicator lives longer than that."""
_NUM_TWINS = 3
_CELLS = 64


class State:
    """One rank's part. All ranks call the same methods in the same order."""

    def __init__(self, seed: int) -> None:
        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.seed, self.step = seed, -1
        self.digest = hashlib.sha256()
        self.comms: list[MPI.Intracomm] = [self.world.Dup(), self.world.Split(self.rank % 2, -self.rank)]
        """Members differ, but the list is as long on all ranks; no message stays here from one step to the next."""
        self.twins = [self.world.Dup() for _ in range(_NUM_TWINS)]
        """Of the world; messages that stay have tags from `tag_of_step` on."""
        self.window = MPI.Win.Allocate(8 * _CELLS, 8, comm=self.world)
        self._open: list[tuple[int, int, Callable[[], None]]] = []

    # --- the course of the program ---

    def begin(self, number: int) -> None:
        """The next step: first complete what is due."""
        self.step = number
        for due in sorted(self._open, key=lambda each: each[:2]):
            if due[0] <= number:
                self._open.remove(due)
                due[2]()

    def after(self, steps: int, finish: Callable[[], None]) -> None:
        """Call this some steps later; like a step, it must be safe to run on all ranks at once."""
        self._open.append((self.step + steps, len(self._open) + 1000 * self.step, finish))

    def leave(self, chance: random.Random, finish: Callable[[], None]) -> None:
        """Call this after some steps, or at once."""
        steps = chance.choice((0, 1, 3, 8, LONGEST_OPEN))
        if steps:
            self.after(steps, finish)
        else:
            finish()

    def end(self) -> None:
        """Complete everything and give back what is left."""
        self.begin(self.step + 10 * LONGEST_OPEN)
        self.window.Free()
        for comm in self.comms + self.twins:
            comm.Free()

    # --- what a step draws ---

    def comm(self, chance: random.Random) -> MPI.Intracomm:
        """A communicator on which nothing stays."""
        return chance.choice(self.comms)

    def length(self, chance: random.Random) -> int:
        """Bytes of a message, mostly few."""
        return chance.choice(LENGTHS[:_COMMON] if chance.random() < 0.7 else LENGTHS)

    @property
    def tag_of_step(self) -> int:
        """For what stays on a twin."""
        return 1000 + self.step

    def make(self, salt: int, length: int) -> np.ndarray:
        """Bytes that no other rank, step or salt has."""
        return np.random.default_rng([self.seed, self.step, self.rank, salt]).integers(0, 256, length, np.uint8)

    def numbers(self, salt: int, count: int) -> np.ndarray:
        """Integers whose sums are exact."""
        return np.random.default_rng([self.seed, self.step, self.rank, salt]).integers(0, 1 << 40, count, np.int64)

    def thing(self, salt: int, length: int) -> dict[str, Any]:
        """An object with a long array in it."""
        return {"who": (self.rank, self.step), "salt": [salt, None, "ä"], "data": self.make(salt, length)}

    # --- what it got ---

    def fold(self, *values: Any) -> None:
        """Into the digest; containers by their elements, buffers by their bytes."""
        for value in values:
            if isinstance(value, dict):
                self.fold(*(part for item in sorted(value.items()) for part in item))
            elif isinstance(value, (list, tuple)):
                self.digest.update(b"%d elements" % len(value))
                self.fold(*value)
            elif isinstance(value, (np.ndarray, bytes, bytearray, memoryview)):
                self.digest.update(memoryview(value).cast("B"))
            elif isinstance(value, MPI.Status):
                source = "nobody" if value.source == MPI.PROC_NULL else value.source
                self.fold(source, value.tag, value.Get_count(MPI.BYTE), value.Is_cancelled())
            else:
                self.digest.update(repr(value).encode())


def one_of(chance: random.Random, count: int) -> int:
    """0 to ``count - 1``; what is drawn next does not depend on ``count``, which may differ from rank to rank."""
    return chance.randrange(1 << 16) % count


def room(chance: random.Random, length: int) -> Any:
    """Bytes to receive into: an array or a bytearray, exact or too long."""
    length += chance.choice((0, 0, 5))
    return bytearray(length) if chance.random() < 0.3 else np.zeros(length, np.uint8)


def completed(chance: random.Random, requests: list[MPI.Request]) -> list[MPI.Status]:
    """Complete them in one of the ways there are; a status for each."""
    statuses = [MPI.Status() for _ in requests]
    way = chance.choice((_all_at_once, _last_first, _any, _some, _polled))
    way(requests, statuses)
    return statuses


def _all_at_once(requests: list[MPI.Request], statuses: list[MPI.Status]) -> None:
    MPI.Request.Waitall(requests, statuses)


def _last_first(requests: list[MPI.Request], statuses: list[MPI.Status]) -> None:
    for request, status in reversed(list(zip(requests, statuses, strict=True))):
        request.Wait(status)


def _any(requests: list[MPI.Request], statuses: list[MPI.Status]) -> None:
    status = MPI.Status()
    while (index := MPI.Request.Waitany(requests, status)) != MPI.UNDEFINED:
        statuses[index] = status
        status = MPI.Status()


def _some(requests: list[MPI.Request], statuses: list[MPI.Status]) -> None:
    while True:
        got = [MPI.Status() for _ in requests]
        indices = MPI.Request.Waitsome(requests, got)
        if indices is None:
            return
        for index, status in zip(indices, got, strict=False):
            statuses[index] = status


def _polled(requests: list[MPI.Request], statuses: list[MPI.Status]) -> None:
    while not MPI.Request.Testall(requests, statuses):
        pass


def received(comm: MPI.Intracomm, source: int, tag: int, way: int) -> tuple[bytes, MPI.Status]:
    """A message of unknown length, received in one of five ways; wildcards are allowed."""
    status = MPI.Status()
    if way % 5 < 2:
        message = comm.Mprobe(source, tag, status) if way % 5 == 0 else None
        while message is None:
            message = comm.Improbe(source, tag, status)
        into = bytearray(status.Get_count(MPI.BYTE))
        message.Recv(into, status) if way % 2 else message.Irecv(into).Wait(status)
    elif way % 5 < 4:
        if way % 5 == 2:
            comm.Probe(source, tag, status)
        else:
            while not comm.Iprobe(source, tag, status):
                pass
        into = bytearray(status.Get_count(MPI.BYTE))
        comm.Recv(into, status.source, status.tag, status)
    else:
        into = bytearray(LENGTHS[-1])
        comm.Recv(into, source, tag, status)
    return bytes(into[: status.Get_count(MPI.BYTE)]), status
