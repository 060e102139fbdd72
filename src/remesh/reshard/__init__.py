"""From the layout that is to the layout that is wanted: planning, and carrying plans out.

The planner is pure and needs NumPy only. What touches torch (`reshard`, `gather_moves`, `run_plan`, `Moved`) is
imported at its first use. The package itself can be called: ``remesh.reshard(give, take)`` is `remesh.reshard.reshard`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from remesh.callable_package import make_callable
from remesh.reshard.bound import Bound, compute_lower_bound
from remesh.reshard.plan import Plan
from remesh.reshard.planner import DEFAULT_CHUNK_BYTES, plan_reshard
from remesh.reshard.program import Copy, Message, Program
from remesh.reshard.senders import assign_whole, split_senders
from remesh.reshard.tasks import Missing, TensorMove, UnitTask, compute_missing_boxes, compute_tasks

if TYPE_CHECKING:
    from remesh.reshard.api import gather_moves, reshard
    from remesh.reshard.run import Moved, run_plan

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Bound",
    "Copy",
    "Message",
    "Missing",
    "Moved",
    "Plan",
    "Program",
    "TensorMove",
    "UnitTask",
    "assign_whole",
    "compute_lower_bound",
    "compute_missing_boxes",
    "compute_tasks",
    "gather_moves",
    "plan_reshard",
    "reshard",
    "run_plan",
    "split_senders",
]

_HOMES = {
    "Moved": "remesh.reshard.run",
    "gather_moves": "remesh.reshard.api",
    "reshard": "remesh.reshard.api",
    "run_plan": "remesh.reshard.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'remesh.reshard' has no attribute {name!r}")


make_callable(__name__, "remesh.reshard.api")
