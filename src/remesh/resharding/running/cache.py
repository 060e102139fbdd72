"""Resharder: plans each pair of layouts once, and uses the plan again for repeated calls.

Definitions. The *description* of a call is what all ranks give and want: names, dtypes, shapes, boxes; and with which
options. What all ranks described once has an *epoch* (`remesh.comm.agreement`), and the transfer is kept under it.

A call, in steps:

1. Every rank sends the epochs that it remembers for its own part, and those for which its tensors lie where they lay
   before. This is one small gather, and the agreement of the run at the same time.
2. Known epoch, same memory everywhere: the run begins. Nothing is planned, no metadata is gathered, no region of memory
   is looked up.
3. Known epoch, other memory on some rank: the ranks check their tensors against the kept transfer, and look up anew.
4. Unknown epoch: descriptions are gathered, options compared; the transfer is planned as part of the second gather, in
   which the ranks compare its digest, so a rank that cannot plan keeps no other waiting. A resharder that has planned
   nothing yet gathers descriptions in step 1. What another one in this process has planned last in the same epoch is
   not planned again, so calls of `remesh.reshard` in a loop plan once.

A rank that is called with the very same tensor objects does not even describe them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from remesh.comm.agreement import Agreement, Agreements
from remesh.comm.gather import Group, check_group, group_rank
from remesh.foundation.torch_private import never_compiled
from remesh.layout.from_torch import Piece
from remesh.resharding.planning.transfer import PlanOptions, Transfer, plan_stacked
from remesh.resharding.running.check_pieces import check_memories, check_writable
from remesh.resharding.running.describe import (
    DOING,
    Tensors,
    check_plan_options,
    check_tensors,
    describe_all,
    hosts_of,
    moves_of,
    pieces_of,
    settle_options,
    tell_options,
)
from remesh.resharding.running.handle import Handle
from remesh.resharding.running.run import BoundTransfer, Moved, agree_on_run, propose_tag, settle_tag

_MAX_PLACES = 4
"""With so many sets of tensors a plan may alternate without looking anything up: two are double buffers."""
_MAX_JOBS = 16
"""Pairs of an epoch and a set of tensors that are kept ready."""
_MAX_PLANNED = 4
_MAX_MESSAGES = 1 << 15
"""Transfers of more messages are not kept for other resharders: they take much memory."""
_planned: dict[str, Transfer] = {}
"""The last transfers of all resharders, by epoch, oldest first. Invariant: at most _MAX_PLANNED."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What one rank was called with."""

    objects: tuple[Any, ...]
    """How many are given, then names and tensors, kept alive, so that their identity means something."""
    give: Mapping[str, Piece]
    take: Mapping[str, Piece]
    description: Mapping[str, Any]
    places: tuple[Any, ...]
    """Where the tensors lie in memory."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all ranks have agreed on."""

    job: BoundTransfer
    """This rank's part of the next run."""
    tag: int
    """Tag of the run."""
    said: Sequence[Any]
    """What every rank sent beside, by rank."""

    def start(self) -> Handle:
        """Begin the run in a thread."""
        return Handle(self.job, self.tag).start()


@never_compiled
class Resharder:
    """Moves states between layouts, and keeps the plans for repeated calls.

    Belongs to one group; make a new one for a new group. Used by all its ranks alike, one call after the other.
    """

    def __init__(self, group: Group = None, **options: Unpack[PlanOptions]) -> None:
        check_group(group)
        check_plan_options(options)
        self._group = group
        hosts = options.get("host_of")
        self._options: PlanOptions = options if hosts is None else {**options, "host_of": dict(hosts)}
        self._told_options: dict[str, Any] | None = None
        """What this rank sends the others of its options, once these have been checked."""
        self._calls: list[_Call] = []
        """The last calls with different tensors, oldest first. Invariant: at most _MAX_PLACES."""
        self._agreements = Agreements(tells_first_at_once=True)
        self._jobs: dict[tuple[str, tuple[Any, ...]], BoundTransfer] = {}
        """By epoch and where the tensors lie, oldest first; all have been checked. Invariant: at most _MAX_JOBS."""
        self.num_planned = 0
        """Calls that had to plan."""
        self.num_reused = 0
        """Calls that found their plan."""

    @classmethod
    def for_one_call(cls, group: Group, options: PlanOptions) -> Resharder:
        """A resharder that looks at its options when it is called, so that what is wrong is raised on all ranks."""
        made = cls(group)
        made._options = options
        return made

    def reshard(self, give: Tensors, take: Tensors) -> Moved:
        """Fill the tensors of ``take`` in place from those of ``give``; returns what was moved.

        As `remesh.reshard`: called by every rank of the group, and the same errors.
        """
        meeting = self.meet(lambda: (give, take))
        return meeting.job.run(meeting.tag)

    def start(self, give: Tensors, take: Tensors) -> Handle:
        """As `reshard`, in a thread. Called by every rank; blocks until all have agreed on the plan."""
        return self.meet(lambda: (give, take)).start()

    def clear(self) -> None:
        """Forget all plans and let go of all tensors."""
        self._calls.clear()
        self._agreements.clear()
        self._jobs.clear()

    def meet(
        self, ask: Callable[[], tuple[Tensors, Tensors]], tell: Callable[[], Any] = lambda: None, doing: str = DOING
    ) -> Meeting:
        """Agree with all ranks on the next run; each rank also sends the others what ``tell()`` returns, as JSON.

        ``ask`` returns what this rank gives and takes. Called by every rank of the group; raises what is wrong, also
        what ``ask`` and ``tell`` raise, alike on all ranks. Moves nothing.
        """
        call: _Call | None = None

        def answer() -> tuple[list[Any], list[Any]]:
            nonlocal call
            if self._told_options is None:
                check_plan_options(self._options)
                self._told_options = tell_options(self._options)
            call = self._describe(*ask())
            ready = [epoch for epoch, places in self._jobs if places == call.places]
            return [call.description, self._told_options], [ready, propose_tag(self._group), tell()]

        agreement = self._agreements.agree(answer, self._group, doing)
        assert call is not None
        job = self._jobs.get((agreement.agreed.epoch, call.places))
        if agreement.told is None and all(agreement.agreed.epoch in ready for ready, *_ in agreement.beside):
            assert job is not None
            tag = settle_tag([tag for _, tag, _ in agreement.beside])
        else:
            job, tag = self._make_ready(agreement, call)
        # A DTensor has a version of its own beside that of its local tensor, which a run renews.
        increment_version([one for _, one in call.objects[1 + call.objects[0] :] if isinstance(one, DTensor)])
        if agreement.told is None:
            self.num_reused += 1
        else:
            self.num_planned += 1
        return Meeting(job, tag, [said for *_, said in agreement.beside])

    def _make_ready(self, agreement: Agreement[Any], call: _Call) -> tuple[BoundTransfer, int]:
        """This rank's job and the tag of its next run, once all ranks are ready for it."""
        kept = agreement.agreed.kept
        if agreement.told is not None:
            options = settle_options([told for _, told in agreement.told], self._options, self._group)

        def make() -> BoundTransfer:
            if agreement.told is not None:
                kept["transfer"] = _plan(agreement.agreed.epoch, [each for each, _ in agreement.told], options)
            return BoundTransfer(kept["transfer"], call.give, call.take, self._group)

        job, tag = agree_on_run(make, self._group)
        self._agreements.remember(agreement)
        self._jobs[agreement.agreed.epoch, call.places] = job
        if len(self._jobs) > _MAX_JOBS:
            del self._jobs[next(iter(self._jobs))]
        return job, tag

    def _describe(self, give: Tensors, take: Tensors) -> _Call:
        objects: tuple[Any, ...] = ()
        places: tuple[Any, ...] = ()
        if isinstance(give, Mapping) and isinstance(take, Mapping):
            objects = (len(give), *((name, side[name]) for side in (give, take) for name in sorted(side, key=str)))
            places = _places(objects)
        # What was checked before needs no check.
        for known in self._calls:
            if places == known.places and _are_the_same(objects, known.objects):
                return known
        check_tensors(give, "give")
        check_tensors(take, "take")
        given, taken = pieces_of(give), pieces_of(take)
        for pieces in (given, taken):
            check_memories(pieces, group_rank(self._group))
        check_writable(taken, group_rank(self._group))
        call = _Call(objects, given, taken, describe_all(given, taken), places)
        self._calls = [*self._calls[1 - _MAX_PLACES :], call]
        return call


def _plan(epoch: str, described: Sequence[Any], options: PlanOptions) -> Transfer:
    """What the epoch alone decides, whatever group and resharder it is for."""
    transfer = _planned.pop(epoch, None) or plan_stacked(
        moves_of(described), options.get("host_of") or hosts_of(described), options
    )
    if transfer.plan.rows.num_messages <= _MAX_MESSAGES:
        _planned[epoch] = transfer
    for oldest in list(_planned)[:-_MAX_PLANNED]:
        _planned.pop(oldest, None)
    return transfer


def _are_the_same(objects: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return (
        objects[0] == others[0]
        and len(objects) == len(others)
        and all(
            name == other_name and thing is other
            for (name, thing), (other_name, other) in zip(objects[1:], others[1:], strict=True)
        )
    )


def _places(objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """The memory of each tensor; the description has what lies there."""
    places = []
    with torch.no_grad():
        for _, thing in objects[1:]:
            tensor = thing.tensor if isinstance(thing, Piece) else thing
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            is_dense = isinstance(tensor, torch.Tensor) and not (is_lazy(tensor) or tensor.is_nested)
            if is_dense and tensor.layout is torch.strided:
                places.append((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device))
    return tuple(places)
