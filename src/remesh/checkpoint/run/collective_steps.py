"""Collective steps of a save or load: an error in one is raised on all ranks alike.

A save or a load is a sequence of such steps. Within one, a rank works alone; between two, all know that it went well
everywhere. So when one raises, all have done the steps before it and none has begun the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from remesh.checkpoint.checkpoint_errors import as_checkpoint_error
from remesh.comm.gather import Group, group_rank, step_together

take_step = partial(step_together, translate=as_checkpoint_error)
"""`step_together`, with the errors of the step in this room's types. Called by every rank of the group."""


def take_first_step(step: Callable[[], None], group: Group, doing: str) -> None:
    """Let the first rank of the group do something while the others wait. Called by every rank of the group."""
    take_step(lambda: step() if group_rank(group) == 0 else None, group, doing)
