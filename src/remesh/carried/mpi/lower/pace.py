"""Pace at which the halves of a rank poll: fast answers, and free cores for the processes that compute.

Waiting for MPI means asking it again and again. While the upper half waits for a reply its core is free, so its lower
half may ask without pause; while the upper half computes, the lower half sleeps, or asks now and then. With fewer cores
than processes that could run at once, everybody gives way early.

A lower half waits on the core of its program (``_engine_rest.c``), where a call is a switch between two processes;
waking an idle core takes ten times as long. While calls are dense neither sleeps, they give way to each other
(``library/slots.c``). Only where cores are many, too, do both spin, apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from remesh.carried.mpi.native import measure_spin_rate

_SPIN_US: Final = 15.0
"""Spin time: longer than a small call takes, so a burst of calls never sleeps; shorter than anyone would notice."""
_GIVE_WAY_US: Final = 50
_FOR_EVER_US: Final = 1 << 40
_UPPER_SPIN_US: Final = 10_000.0
"""Spin time of an upper half that always spins: it sleeps at last while others take long."""


_MASK_BYTES: Final = 1024
"""Length of a mask with room for more cores than Linux allows."""


@dataclass(frozen=True, slots=True)
class WaitingPace:
    """The turns and times of waiting."""

    upper_spin: int  # turns the upper half spins for a reply before it sleeps
    lower_spin: int  # turns the lower half spins for a request before it sleeps
    eager_us: int  # of polling MPI in vain, with the upper half waiting, before the core is offered to others
    patient_us: int  # and before it sleeps between polls
    give_way_us: int = 0  # how long either half gives way to the other on their core before it sleeps
    seat: tuple[int, ...] = ()  # cores for copying and for moving MPI on, so that ranks keep out of each other's way
    always_spins: bool = False  # the engine spins for requests, however long
    shortest_sleep_us: int = 50
    longest_sleep_us: int = 1000  # between polls when something is expected from MPI
    idle_sleep_us: int = 20_000  # when nothing is expected, MPI is still given a chance so often

    @classmethod
    def of(cls, mpi: Any, *, spinning: bool = False) -> Self:
        """Choose the pace of this rank, after counting its cores and who shares them (all ranks call this)."""
        cores = os.sched_getaffinity(0)
        num_ranks, index = _find_sharers(mpi, cores)
        pace = cls.chosen(num_ranks, len(cores), measure_spin_rate(), spinning=spinning)
        return replace(pace, seat=choose_seat(cores, index, num_ranks))

    @classmethod
    def chosen(cls, num_ranks: int, num_cores: int, turns_per_us: float, *, spinning: bool) -> Self:
        """Choose the pace for a host of so many ranks and cores.

        >>> [WaitingPace.chosen(2, cores, 100.0, spinning=False).upper_spin for cores in (4, 2)]
        [1500, 0]
        """
        if spinning:
            upper_spin = int(_UPPER_SPIN_US * turns_per_us)
            return cls(upper_spin, 0, _FOR_EVER_US, _FOR_EVER_US, always_spins=True)
        roomy = num_cores >= 2 * num_ranks
        turns = int(_SPIN_US * turns_per_us) if roomy else 0
        crowded = num_cores < num_ranks
        return cls(
            upper_spin=turns,
            lower_spin=turns,
            eager_us=20 if crowded else 50,
            patient_us=3000 if crowded else 50_000,
            give_way_us=0 if crowded else _GIVE_WAY_US,
        )


def choose_seat(cores: Iterable[int], index: int, num_ranks: int) -> tuple[int, ...]:
    """Choose one rank's share of the cores of ``num_ranks`` ranks; all of them if there are more ranks than cores.

    >>> choose_seat({0, 1, 2, 3}, 1, 2), choose_seat({0, 1}, 2, 3)
    ((2, 3), (0, 1))
    """
    each = sorted(cores)
    if num_ranks > len(each):
        return tuple(each)
    return tuple(each[index * len(each) // num_ranks : (index + 1) * len(each) // num_ranks])


def _find_sharers(mpi: Any, cores: set[int]) -> tuple[int, int]:
    """Count the ranks, with this one, that may run on one of these cores of this machine; also return this one's index.

    MPI_Comm_split_type does not tell: without shared memory each rank may be a host of its own to MPI.
    """
    machine = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", ""))
    mask = sum(1 << core for core in cores)
    own = machine + mask.to_bytes(_MASK_BYTES, "little")
    told = bytearray(len(own) * mpi.COMM_WORLD.Get_size())
    mpi.COMM_WORLD.Allgather([own, mpi.BYTE], [told, mpi.BYTE])
    each = (told[start : start + len(own)] for start in range(0, len(told), len(own)))
    sharing = [one.startswith(machine) and bool(int.from_bytes(one[16:], "little") & mask) for one in each]
    return sum(sharing), sum(sharing[: mpi.COMM_WORLD.Get_rank()])
