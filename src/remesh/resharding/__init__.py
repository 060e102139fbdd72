"""Resharding: from the layout that is to the layout that is wanted, by plans that are run.

The planner is pure and needs NumPy only. What touches torch (`reshard`, `gather_moves`, `run_plan`, `Moved`) is
imported at its first use. The package itself can be called: ``remesh.reshard(give, take)`` is
`remesh.resharding.reshard`.
"""

from typing import TYPE_CHECKING

from remesh.foundation.first_use import names_at_first_use

if TYPE_CHECKING:
    from remesh.resharding.faces import redistribute_across as redistribute_across, reshard_tensor as reshard_tensor
    from remesh.resharding.model.bound import Bound as Bound
    from remesh.resharding.model.network import HostLink as HostLink, Network as Network
    from remesh.resharding.model.program import (
        Copy as Copy,
        Message as Message,
        Program as Program,
        Timing as Timing,
    )
    from remesh.resharding.model.tasks import (
        Missing as Missing,
        SumOrder as SumOrder,
        TensorMove as TensorMove,
        compute_missing_boxes as compute_missing_boxes,
    )
    from remesh.resharding.planning.plan import Plan as Plan
    from remesh.resharding.planning.planner import (
        DEFAULT_CHUNK_BYTES as DEFAULT_CHUNK_BYTES,
        plan_reshard as plan_reshard,
    )
    from remesh.resharding.planning.transfer import Transfer as Transfer, plan_transfer as plan_transfer
    from remesh.resharding.refit import Refit as Refit, Snapshot as Snapshot
    from remesh.resharding.reshard_api import (
        gather_moves as gather_moves,
        reshard as reshard,
        reshard_async as reshard_async,
    )
    from remesh.resharding.running.cache import Resharder as Resharder
    from remesh.resharding.running.handle import Handle as Handle
    from remesh.resharding.running.run import (
        Moved as Moved,
        UnfilledError as UnfilledError,
        gather_timings as gather_timings,
        run_plan as run_plan,
    )
    from remesh.resharding.schedule.senders import assign_whole as assign_whole, split_senders as split_senders
    from remesh.resharding.target import Target as Target
    from remesh.resharding.windows import WindowedReshard as WindowedReshard, reshard_by_windows as reshard_by_windows
else:
    __getattr__, __dir__ = names_at_first_use(__name__)
