"""Something that all ranks of a communicator do, and that fails on all of them or on none."""

from __future__ import annotations

import builtins
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

from remesh.mpi.upper.exceptions import Exception, failure, numbered_failure
from remesh.mpi.upper.membership import number_of
from remesh.mpi.upper.op import OPS

MAX = OPS["MAX"]
_Result = TypeVar("_Result")
Comm = Any
"""An intracommunicator; its collectives are given to its class by a table, which type checkers cannot read."""


def agree(comm: Comm, problem: builtins.Exception | None) -> None:
    """Raise what failed on the first rank where something did; all ranks call this, and it ends when all have.

    Raises:
        Exception: with the class and the words of that rank; the rank itself raises what it met.
    """
    mine, num_failed = array("q", [problem is not None]), array("q", [0])
    comm.Allreduce(mine, num_failed)
    if not num_failed[0]:
        return
    told = comm.allgather(None if problem is None else _in_words(problem))
    rank, (error_class, detail) = next((rank, words) for rank, words in enumerate(told) if words is not None)
    if problem is not None and not isinstance(problem, Exception):
        raise problem
    raise numbered_failure(error_class, f"{detail} (rank {rank})") from problem


def _in_words(problem: builtins.Exception) -> tuple[int, str]:
    if isinstance(problem, Exception):
        return problem.ob_mpi, problem.detail
    return failure("ERR_ARG").ob_mpi, f"{type(problem).__name__}: {problem}"


def attempt(action: Callable[[], _Result]) -> tuple[_Result | None, builtins.Exception | None]:
    """What an action gives, or how it failed."""
    try:
        return action(), None
    except builtins.Exception as problem:
        return None, problem


def together(comm: Comm, action: Callable[[], _Result]) -> _Result:
    """What an action gives that all ranks perform, each its own; if it fails on one, all raise."""
    result, problem = attempt(action)
    agree(comm, problem)
    return result  # type: ignore[return-value]  # no problem: there is a result


def at_first_rank(comm: Comm, action: Callable[[], Any]) -> None:
    """The first rank performs an action, after a collective that brought all here; all raise if it fails."""
    together(comm, action if comm.Get_rank() == 0 else lambda: None)


def expect_same(comm: Comm, value: Any, what: str) -> None:
    """Raise ``ERR_NOT_SAME`` on all ranks unless all give the same value."""
    number = number_of(repr(value))
    mine, largest = array("q", [number, -number]), array("q", [0, 0])
    comm.Allreduce(mine, largest, MAX)
    if largest[0] == -largest[1]:
        return
    told = comm.allgather(value)
    other = next(rank for rank, each in enumerate(told) if each != told[0])
    raise failure("ERR_NOT_SAME", f"{what} is {told[0]!r} on rank 0 and {told[other]!r} on rank {other}")
