"""What does every rank do before any goes on? A step of a save or load, whose error is raised on all alike.

A save or a load is a row of such steps. Within one, a rank works alone; between two, all know that it went well
everywhere. So when one raises, all have done the steps before it and none has begun the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from remesh.checkpoint.errors import CheckpointMismatchError, CheckpointPathError
from remesh.comm.agreement import Agreement, Agreements
from remesh.comm.gather import Group, Together, group_rank, step_together
from remesh.errors import Error, LayoutError

T = TypeVar("T")
P = ParamSpec("P")


@contextmanager
def told_as_checkpoint_errors(doing: str) -> Iterator[None]:
    """Give system and layout errors that leave the block this room's types, with ``doing`` first."""
    try:
        yield
    except Error as raised:
        if isinstance(raised, LayoutError) and not str(raised).startswith(doing):
            raise CheckpointMismatchError(f"{doing}: {raised}") from raised
        raise
    except OSError as raised:
        raise CheckpointPathError(
            f"{doing}: the operating system refused with {raised}; mend the path, the rights or the space and try again"
        ) from raised


def take_step(
    step: Callable[[], T], group: Group, doing: str, *, tell: Callable[[T], Any] = lambda _: None
) -> Together[T]:
    """`step_together`, with the errors of the step in this room's types. Called by every rank of the group."""
    return step_together(_telling(step, doing), group, doing, tell=tell)


def take_first_step(step: Callable[[], None], group: Group, doing: str) -> None:
    """Let the first rank of the group do something while the others wait. Called by every rank of the group."""
    take_step(lambda: step() if group_rank(group) == 0 else None, group, doing)


def take_agreed_step(
    plans: Agreements,
    step: Callable[[], T],
    group: Group,
    doing: str,
    *,
    tell: Callable[[T], Any] = lambda value: value,
) -> Agreement[T]:
    """`Agreements.agree`, with the errors of the step in this room's types. Called by every rank of the group."""
    return plans.agree(_telling(step, doing), group, doing, tell=_telling(tell, doing))


def _telling(act: Callable[P, T], doing: str) -> Callable[P, T]:
    """The same function, its errors in this room's types."""

    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        with told_as_checkpoint_errors(doing):
            return act(*args, **kwargs)

    return told
