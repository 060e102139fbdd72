"""Public function `reshard`: fill these tensors from those, whatever layouts they are in.

Called by every rank of a group, in steps:

1. Every rank sends the others which boxes it gives and wants of which tensors (`describe`), and its host.
2. Every rank computes the same transfer from that (`remesh.resharding.planning.transfer`).
3. It is carried out (`remesh.resharding.running.run`), after its digest was compared.

The layouts need no common mesh: a rank that has nothing of a tensor leaves it out. All errors of the description are
raised on all ranks alike, before anything moves. A program that moves the same state again and again keeps a
`remesh.resharding.Resharder`, which does the first two steps once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack, overload

from torch.distributed.tensor import DTensor

from remesh.comm.gather import Group
from remesh.foundation.errors import PlanError
from remesh.foundation.torch_private import never_compiled
from remesh.resharding.model.tasks import compute_missing_boxes
from remesh.resharding.planning.transfer import PlanOptions
from remesh.resharding.running.cache import Resharder
from remesh.resharding.running.describe import Tensors, gather_moves
from remesh.resharding.running.handle import Handle
from remesh.resharding.running.run import Moved
from remesh.resharding.target import Targets, gather_shapes, make_targets

__all__ = ["Moved", "compute_missing_boxes", "gather_moves", "reshard", "reshard_async"]


@overload
def reshard(give: Tensors, take: Tensors, *, group: Group = None, **options: Unpack[PlanOptions]) -> Moved:
    """Fill the tensors of ``take``."""


@overload
def reshard(give: Tensors, *, to: Targets, group: Group = None, **options: Unpack[PlanOptions]) -> Moved:
    """Make the tensors on their targets and fill them."""


@never_compiled
def reshard(
    give: Tensors,
    take: Tensors | None = None,
    *,
    to: Targets | None = None,
    group: Group = None,
    **options: Unpack[PlanOptions],
) -> Moved:
    """Fill the tensors of ``take`` in place with the values of those of ``give``; returns what was moved.

    With ``to`` instead of ``take``, the tensors are made first, on the mesh and with the placements (and dtype) of the
    target; they are in `Moved.made`. ``to`` is one `Target` for all tensors, or one for each name.

    Called by every rank of the group; blocks until this rank has sent and received everything. A rank may leave out
    either side. Tensors with one name are parts or replicas of one tensor. If dtypes differ the values are cast, and
    partial sums are added up. Raises the same error on all ranks: `PlanError` when no rank holds something that is
    wanted (unless ``missing`` leaves it), when shapes or dtypes clash, or when the memory cap is too small;
    `PeerError` when a rank dies. ``options`` are those of `PlanOptions`: ``host_of``, ``chunk_bytes``, ``missing``,
    ``max_staging_bytes``, ``network``, ``strategy``, ``sum_order``.
    """
    made: dict[str, DTensor] = {}
    shapes = gather_shapes(give, group) if to is not None else {}

    def ask() -> tuple[Tensors, Tensors]:
        if take is not None and to is None:
            return give, take
        if take is not None or to is None:
            raise PlanError(
                f"resharding {len(give)} tensors: {'neither' if to is None else 'both'} of take and to are given, "
                "expected one; name the tensors to fill, or the target to make them on"
            )
        made.update(make_targets(to, shapes))
        return {name: give[name] for name in give if name in made}, made

    meeting = Resharder.for_one_call(group, options).meet(ask)
    moved = meeting.job.run(meeting.tag)
    return replace(moved, made=made) if made else moved


@never_compiled
def reshard_async(give: Tensors, take: Tensors, *, group: Group = None, **options: Unpack[PlanOptions]) -> Handle:
    """Run `reshard` in a thread; returns a handle to wait with.

    Called by every rank of the group; blocks until all have agreed on the plan. From then on the bytes move while the
    caller computes, and may even communicate in the same group. Until the handle is done the tensors of ``give`` must
    not be changed, and those of ``take`` not be used.
    """
    return Resharder.for_one_call(group, options).start(give, take)
