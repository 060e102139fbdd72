"""How is a plan used again? A resharder that plans each pair of layouts once.

Definitions. The *description* of a call is what all ranks give and want: names, dtypes, shapes, boxes. Its *key* is the
digests of the ranks' parts, so ranks need not tell each other more than that to know that they have been here before.

A call, in steps:

1. Every rank tells the digest of its own part, and whether its tensors lie where they lay before. This is one
   small gather, and the agreement of the run at the same time.
2. Known key, same memory everywhere: the run begins. Nothing is planned, no metadata is gathered, no region of memory
   is looked up.
3. Known key, other memory on some rank: the ranks check their tensors against the kept transfer, and look up anew.
4. Unknown key: descriptions are gathered, the transfer is planned and kept. A resharder that has planned nothing yet
   gathers them in step 1, so its first call has one gather for all that the ranks say, and one to agree.

A rank that is called with the very same tensor objects does not even describe them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch.distributed.tensor import DTensor

from remesh.comm.gather import Group, gather_from, group_rank
from remesh.layout.from_torch import Piece
from remesh.reshard.planning.transfer import PlanOptions, Transfer, plan_transfer
from remesh.reshard.running.describe import DOING, Tensors, describe_all, digest_of, hosts_of, moves_of, pieces_of
from remesh.reshard.running.handle import Handle
from remesh.reshard.running.regions import check_memories
from remesh.reshard.running.run import Job, Moved, propose_tag, settle_tag

_MAX_PLACES = 4
"""With so many sets of tensors a plan may alternate without looking anything up: two are double buffers."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What one rank was called with."""

    objects: tuple[Any, ...]
    """How many are given, then names and tensors, kept alive, so that their identity means something."""
    give: Mapping[str, Piece]
    take: Mapping[str, Piece]
    description: Mapping[str, Any]
    digest: str
    """Of the description."""
    places: tuple[Any, ...]
    """Where the tensors lie in memory."""


@dataclass(slots=True)
class _Kept:
    """A transfer, and this rank's jobs of it."""

    transfer: Transfer
    jobs: dict[tuple[Any, ...], Job]
    """By where the tensors lie, oldest first. Invariant: at most _MAX_PLACES."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all ranks have agreed on."""

    job: Job
    """This rank's part of the next run."""
    tag: int
    """Tag of the run."""
    said: Sequence[Any]
    """What every rank had to say beside, by rank."""

    def start(self) -> Handle:
        """Begin the run in a thread."""
        return Handle(self.job, self.tag).start()


class Resharder:
    """Moves states between layouts, and remembers how.

    Belongs to one group; make a new one for a new group. Used by all its ranks alike, one call after the other.
    """

    def __init__(self, group: Group = None, **options: Unpack[PlanOptions]) -> None:
        self._group = group
        self._options = options
        self._calls: list[_Call] = []
        """The last calls with different tensors, oldest first. Invariant: at most _MAX_PLACES."""
        self._kept: dict[tuple[str, ...], _Kept] = {}
        self._checked: set[tuple[str, tuple[Any, ...]]] = set()
        """Digests and places that were checked against a kept transfer."""
        self.num_planned = 0
        """Calls that had to plan."""
        self.num_reused = 0
        """Calls that found their plan."""

    def reshard(self, give: Tensors, take: Tensors) -> Moved:
        """Fill the tensors of ``take`` in place from those of ``give``; what was moved.

        As `remesh.reshard`: called by every rank of the group, and the same errors.
        """
        meeting = self.meet(give, take)
        return meeting.job.run(meeting.tag)

    def start(self, give: Tensors, take: Tensors) -> Handle:
        """The same in a thread. Called by every rank; blocks until all agreed on the plan, not until bytes moved."""
        return self.meet(give, take).start()

    def clear(self) -> None:
        """Forget all plans and let go of all tensors."""
        self._calls.clear()
        self._kept.clear()
        self._checked.clear()

    def meet(self, give: Tensors, take: Tensors, tell: Callable[[], Any] = lambda: None) -> Meeting:
        """Agree with all ranks on the next run, and on what each of them has to say beside: ``tell()``, as JSON.

        Called by every rank of the group; raises what is wrong, alike on all ranks. Moves nothing.
        """
        call: _Call | None = None
        is_first = not self._kept

        def answer() -> list[Any]:
            nonlocal call
            call = self._describe(give, take)
            checked = (call.digest, call.places) in self._checked
            return [call.digest, checked, propose_tag(self._group), tell(), call.description if is_first else None]

        told = gather_from(answer, self._group, DOING)
        assert call is not None
        key = tuple(digest for digest, *_ in told)
        said = [each[3] for each in told]
        kept = self._kept.get(key)
        if kept is None:
            self.num_planned += 1
            kept = _Kept(self._plan([each[4] for each in told] if is_first else self._gather(call)), {})
        else:
            self.num_reused += 1
        job = kept.jobs.get(call.places) or Job(kept.transfer, call.give, call.take, self._group)
        if key in self._kept and all(checked for _, checked, *_ in told):
            tag = settle_tag([tag for _, _, tag, *_ in told])
        else:
            tag = job.agree()
            self._checked.add((call.digest, call.places))
        self._keep(key, kept, call, job)
        return Meeting(job, tag, said)

    def _keep(self, key: tuple[str, ...], kept: _Kept, call: _Call, job: Job) -> None:
        self._kept[key] = kept
        kept.jobs[call.places] = job
        if len(kept.jobs) > _MAX_PLACES:
            oldest = next(iter(kept.jobs))
            del kept.jobs[oldest]
            self._checked.discard((call.digest, oldest))

    def _gather(self, call: _Call) -> list[Any]:
        return gather_from(lambda: dict(call.description), self._group, DOING)

    def _plan(self, described: Sequence[Any]) -> Transfer:
        hosts = self._options.get("host_of") or hosts_of(described)
        return plan_transfer(moves_of(described), hosts, self._options)

    def _describe(self, give: Tensors, take: Tensors) -> _Call:
        objects = (len(give), *((name, side[name]) for side in (give, take) for name in sorted(side)))
        places = _places(objects)
        for known in self._calls:
            if places == known.places and _are_the_same(objects, known.objects):
                return known
        given, taken = pieces_of(give), pieces_of(take)
        for pieces in (given, taken):
            check_memories(pieces, group_rank(self._group))
        description = describe_all(given, taken)
        call = _Call(objects, given, taken, description, digest_of(description), places)
        self._calls = [*self._calls[1 - _MAX_PLACES :], call]
        return call


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
    """Where each tensor lies: the description says what lies there."""
    places = []
    with torch.no_grad():
        for _, thing in objects[1:]:
            tensor = thing.tensor if isinstance(thing, Piece) else thing
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, torch.Tensor):
                places.append((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device))
    return tuple(places)
