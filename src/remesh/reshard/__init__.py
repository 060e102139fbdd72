"""From the layout that is to the layout that is wanted: plans transfers, and runs the plans.

The planner is pure and needs NumPy only. What touches torch (`reshard`, `gather_moves`, `run_plan`, `Moved`) is
imported at its first use. The package itself can be called: ``remesh.reshard(give, take)`` is `remesh.reshard.reshard`.
"""

from typing import TYPE_CHECKING, Any

from remesh.callable_package import make_callable
from remesh.first_use import attribute_at_home
from remesh.reshard.model.bound import Bound, compute_lower_bound
from remesh.reshard.model.network import HostLink, Network
from remesh.reshard.model.program import Copy, Message, Program
from remesh.reshard.model.tasks import Missing, TensorMove, UnitTask, compute_missing_boxes, compute_tasks
from remesh.reshard.planning.plan import Plan
from remesh.reshard.planning.planner import DEFAULT_CHUNK_BYTES, plan_reshard
from remesh.reshard.planning.transfer import Transfer, plan_transfer
from remesh.reshard.running.telemetry import Timing
from remesh.reshard.schedule.senders import assign_whole, split_senders

if TYPE_CHECKING:
    from remesh.reshard.api import gather_moves, reshard, reshard_async
    from remesh.reshard.faces import redistribute_across, reshard_tensor
    from remesh.reshard.refit import Refit, Snapshot
    from remesh.reshard.running.cache import Resharder
    from remesh.reshard.running.handle import Handle
    from remesh.reshard.running.run import Moved, UnfilledError, gather_timings, run_plan
    from remesh.reshard.target import Target
    from remesh.reshard.windows import WindowedReshard, reshard_by_windows

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Bound",
    "Copy",
    "Handle",
    "HostLink",
    "Message",
    "Missing",
    "Moved",
    "Network",
    "Plan",
    "Program",
    "Refit",
    "Resharder",
    "Snapshot",
    "Target",
    "TensorMove",
    "Timing",
    "Transfer",
    "UnfilledError",
    "UnitTask",
    "WindowedReshard",
    "assign_whole",
    "compute_lower_bound",
    "compute_missing_boxes",
    "compute_tasks",
    "gather_moves",
    "gather_timings",
    "plan_reshard",
    "plan_transfer",
    "redistribute_across",
    "reshard",
    "reshard_async",
    "reshard_by_windows",
    "reshard_tensor",
    "run_plan",
    "split_senders",
]

_HOMES = {
    "Handle": "remesh.reshard.running.handle",
    "Moved": "remesh.reshard.running.run",
    "Refit": "remesh.reshard.refit",
    "Resharder": "remesh.reshard.running.cache",
    "Snapshot": "remesh.reshard.refit",
    "Target": "remesh.reshard.target",
    "UnfilledError": "remesh.reshard.running.run",
    "WindowedReshard": "remesh.reshard.windows",
    "gather_moves": "remesh.reshard.api",
    "gather_timings": "remesh.reshard.running.run",
    "redistribute_across": "remesh.reshard.faces",
    "reshard": "remesh.reshard.api",
    "reshard_async": "remesh.reshard.api",
    "reshard_by_windows": "remesh.reshard.windows",
    "reshard_tensor": "remesh.reshard.faces",
    "run_plan": "remesh.reshard.running.run",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        return attribute_at_home(__name__, _HOMES, name)


make_callable(__name__, "remesh.reshard.api")
