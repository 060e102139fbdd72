"""A lower half that leaves ends what is open with data that nobody may see: neither the program nor its request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from remesh.carried.mpi.calls.table import EAGER_BYTES, REAL_OPS, REAL_TYPES, Kind
from remesh.carried.mpi.lower.collectives import WORLD, Collectives
from remesh.carried.mpi.lower.real_collectives import CollectiveCall
from remesh.carried.mpi.lower.requests import Requests
from remesh.carried.mpi.lower.upper_memory import UpperMemory

_NUM_BYTES = 4 * EAGER_BYTES


class _World:
    """A real communicator of one rank, whose collectives are over when `is_over` says so."""

    def __init__(self) -> None:
        self.is_over = False

    def Get_size(self) -> int:
        return 1

    def Allgather(self, mine: Any, everybody: Any) -> None:
        everybody[0][:] = mine[0]

    def Allgatherv(self, mine: Any, everybody: Any) -> None:
        everybody[0][:] = mine[0]

    def Ialltoall(self, send: Any, receive: Any) -> Any:
        return SimpleNamespace(Test=lambda: self.is_over)


class _Memory(UpperMemory):
    """The program's, in which what was written is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    def write(self, address: int, data: Any) -> None:
        self.written.append(address)


def _collectives(world: _World, memory: _Memory) -> Collectives:
    datatype = SimpleNamespace(extent=8, size=8)
    names: dict[str, Any] = dict.fromkeys(REAL_OPS) | dict.fromkeys(REAL_TYPES, datatype)
    names |= {"INT": datatype, "Exception": RuntimeError, "_handleof": lambda real: 0}
    mpi = SimpleNamespace(**names)
    wire = SimpleNamespace(rank=0)
    return Collectives(mpi, world, world, Requests(), wire, memory)  # type: ignore[arg-type]


def _started(collectives: Collectives) -> Any:
    job = CollectiveCall(Kind.ALLTOALL, 0, 0, 0, bytes(_NUM_BYTES), _NUM_BYTES)
    return collectives.start(WORLD, job, 0x1000)


def test_what_ends_before_a_rank_leaves_is_the_programs() -> None:
    world, memory = _World(), _Memory()
    collectives = _collectives(world, memory)
    request = _started(collectives)
    world.is_over = True
    assert collectives.poll()
    assert memory.written == [0x1000]
    assert request.done


def test_what_ends_while_a_rank_leaves_is_nobodys() -> None:
    world, memory = _World(), _Memory()
    collectives = _collectives(world, memory)
    request = _started(collectives)
    collectives.stand_in(())
    world.is_over = True
    collectives.poll()
    assert not collectives.is_running
    assert memory.written == []
    assert not request.done
