"""Run of a transfer by the ranks of a group: agreement, sums, messages, copies, and an end for all or for none.

Each rank, in steps:

1. See that its tensors are what the transfer was planned for. All ranks compare its digest and exchange what went wrong
   so far; nothing moves unless all are ready. They agree on a tag, so that runs do not mix.
2. Sum what is held as partial sums (`remesh.resharding.planning.reduction`).
3. Go through its messages (`remesh.resharding.running.carry`), and copy what it holds itself while it waits for others;
   a rank that passes on what it takes copies afterwards, because others wait for it.
4. Send all others that it has all it wanted, and wait to receive it from them (`tree`; over NCCL by a gather on the
   same communicator, behind all messages): a run ends well for all or for none.

A peer that dies breaks its connections. A rank that notices breaks off its own, so all ranks learn of it one after the
other, at once; each raises `UnfilledError`, which names the tensors that did not get all their elements there.

Memory that a run needs is made in step 1, as far as it can be known: where a rank has none left, all get the error
then, and nothing has moved.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from remesh.comm.gather import (
    Group,
    all_gather_json,
    break_off,
    check_end,
    gather_from,
    group_device,
    group_rank,
    group_size,
    is_of_own_device,
    is_queued,
    peer_error,
    reporting_lack_of_memory,
    step_together,
)
from remesh.comm.word_tree import Farewell
from remesh.foundation.errors import PeerError, PlanError
from remesh.foundation.torch_private import never_compiled
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece, torch_dtype
from remesh.resharding.model.program import Timing
from remesh.resharding.model.tasks import unstack
from remesh.resharding.planning.plan import Plan
from remesh.resharding.planning.rank_steps import Act
from remesh.resharding.planning.transfer import RankSteps, Transfer
from remesh.resharding.running.carry import Link, Mover, Staging, Summer
from remesh.resharding.running.check_pieces import check_pieces, find_clashes, find_sharing
from remesh.resharding.running.regions import LocalCopy, Regions, needs_copy
from remesh.resharding.running.telemetry import BytesByPair, merge_timings

_DOING = "resharding"
_FIRST_TAG = 0x5E540000
_NUM_TAGS = 1 << 15
"""Messages have these tags, the words at the end of their run as many more."""
_MAX_LISTED = 8
_next_tags: dict[int, itertools.count[int]] = {}


@dataclass(frozen=True, slots=True)
class Moved:
    """What a run has moved: bytes, times, messages."""

    bytes_by_pair: Mapping[tuple[int, int], int]
    """Bytes sent, by (giver, taker), between all ranks of the group; the same on every rank. Counted when looked at."""
    bytes_local: int
    """Bytes copied within the memory of a rank, over all ranks."""
    seconds: float
    """Time on this rank from the agreement on the plan to its last byte."""
    lower_bound_bytes: int
    """Bytes that the busiest NIC had to carry at the least."""
    num_rounds: int
    """Rounds of the schedule."""
    missing: dict[str, tuple[Box, ...]]
    """Boxes that no rank held and that keep their values, by tensor; empty unless the caller allowed it."""
    planned_staging_bytes: int = 0
    """Most staging that this rank was planned to need."""
    peak_staging_bytes: int = 0
    """Most staging that it had. Invariant: at most what was planned."""
    given: tuple[Timing, ...] = ()
    """Messages that this rank sent, as they went."""
    taken: tuple[Timing, ...] = ()
    """Messages that this rank received, as they came."""
    made: Mapping[str, DTensor] = field(default_factory=dict)
    """The tensors that were made to be filled, by name, where `reshard` was given ``to``."""


class UnfilledError(PeerError):
    """Another rank was lost while tensors were on their way to this rank.

    ``unfilled`` names the tensors that this rank wanted and of which it has not every element; what they hold is
    undefined. All others are filled. Moving the unfilled ones again in a new group, from what is left, completes
    when every box of them still has a holder.
    """

    def __init__(self, message: str, unfilled: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.unfilled = tuple(unfilled)


@never_compiled
def run_plan(plan: Plan | Transfer, give: Mapping[str, Piece], take: Mapping[str, Piece], group: Group = None) -> Moved:
    """Carry out a plan: fill the tensors of ``take``, on all ranks, from those of ``give``.

    Called by every rank of the group with the same plan and its own pieces; ranks of the plan are ranks of the group.
    Blocks until every rank has sent and received all its messages. Raises the same error on all ranks before the first
    byte when plans differ or a piece does not fit its plan; raises `UnfilledError`, a `PeerError`, within the group's
    timeout when a rank dies on the way, and then only tensors that the error does not name are defined.
    """

    def make() -> BoundTransfer:
        job = BoundTransfer(plan if isinstance(plan, Transfer) else Transfer.of(plan), give, take, group)
        job.check_pieces()
        return job

    job, tag = agree_on_run(make, group)
    return job.run(tag)


def agree_on_run(make: Callable[[], BoundTransfer], group: Group) -> tuple[BoundTransfer, int]:
    """What ``make`` returns, and the tag of its next run, once all ranks are ready for it.

    Called by every rank of the group; raises what is wrong, also with making it, alike on all ranks.
    """

    def tell(job: BoundTransfer) -> list[Any]:
        return [job.check_ready(), propose_tag(group)]

    ready = step_together(make, group, _DOING, tell=tell)
    _check_digests([digest for digest, _ in ready.told])
    return ready.mine, settle_tag([tag for _, tag in ready.told])


@never_compiled
def gather_timings(moved: Moved, group: Group = None) -> tuple[Timing, ...]:
    """How every message of a run went, the same on every rank, in the order in which they began.

    Called by every rank of the group; blocks until all have called it.
    """
    told = gather_from(lambda: [_rows(moved.given), _rows(moved.taken)], group, "gathering the timings of a reshard")
    given, taken = ([Timing(*row) for each in told for row in each[side]] for side in (0, 1))
    return merge_timings(given, taken)


def _rows(timings: Sequence[Timing]) -> list[list[Any]]:
    return [[t.stage, t.round, t.giver, t.taker, t.nbytes, t.start_s, t.finish_s] for t in timings]


@dataclass(frozen=True, slots=True)
class _Memories:
    """What one rank works on."""

    addends: Regions
    """Partial sums that it gives."""
    wholes: Regions
    """Whole values of partial sums that it keeps on their way."""
    give: Regions
    """Whole values that it gives, those of partial sums among them."""
    take: Regions
    copies: tuple[LocalCopy, ...]
    """Regions that it fills itself."""


class BoundTransfer:
    """One rank's pieces, bound to a transfer; runs as often as it is asked to."""

    def __init__(
        self, transfer: Transfer, give: Mapping[str, Piece], take: Mapping[str, Piece], group: Group = None
    ) -> None:
        self.transfer = transfer
        self._give = give
        self._take = take
        self._group = group
        self._memories: _Memories | None = None
        """Made before the first run."""
        self._clones: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that are given from memory that is taken into, and their copies."""
        self._fixed_bytes = 0
        """Bytes of copies and whole values that stay for the whole run."""
        self._is_fresh = False
        """Whether what was made before the first run has been used by none."""

    @cached_property
    def _todo(self) -> RankSteps:
        """What this rank does."""
        return self.transfer.steps_of(group_rank(self._group))

    @property
    def is_queued(self) -> bool:
        """Whether its messages are queued on a device (`remesh.comm.gather.is_queued`)."""
        return is_queued(self._group)

    def check_pieces(self) -> None:
        """Raise `PlanError` unless this rank's pieces are those that the transfer was planned for."""
        check_pieces(self.transfer.moves, self._give, self._take, group_rank(self._group))

    def check_ready(self) -> str:
        """The digest of the transfer; raises `PlanError` where it does not fit this group or memory."""
        transfer = self.transfer
        size = group_size(self._group)
        hosts = transfer.plan.host_of
        if hosts and max(hosts) >= size:
            raise PlanError(
                f"{_DOING} {transfer.num_tensors} tensors: the plan is for ranks up to {max(hosts)}, found a group of "
                f"{size}; plan for this group"
            )
        # A rank looks at its own part of a plan by rule when it works it out: here, where all hear of what is wrong.
        _ = self._todo
        if transfer.max_staging_bytes is not None:
            self._check_copies(group_rank(self._group), transfer.max_staging_bytes)
        self._see_memory(group_rank(self._group))
        return transfer.digest

    def _see_memory(self, rank: int) -> None:
        """Raise `PlanError` where the memory of a run is not to be had. Keeps what stays, gives staging back."""
        staging_bytes = self._todo.staging_bytes

        def lack(words: str) -> PlanError:
            return PlanError(
                f"{_DOING} {self.transfer.num_tensors} tensors: rank {rank} needs {staging_bytes} bytes of staging and "
                f"{self._fixed_bytes} of copies, found no memory for them ({words}); nothing has moved; free memory, "
                "or set max_staging_bytes"
            )

        with reporting_lack_of_memory(lack):
            with torch.no_grad():
                self.prepare()
            torch.empty(staging_bytes, dtype=torch.uint8, device=group_device(self._group))

    def _check_copies(self, rank: int, cap: int) -> None:
        """Copies of tensors come on top of the staging that was planned; refuse what does not fit under the cap."""
        planned = self._todo.staging_bytes
        pieces = [*self._give.items(), *self._take.items()]
        clashing = find_clashes(self._give, self._take)
        copied = {name: p.tensor.nbytes for name, p in pieces if needs_copy(p.tensor)}
        copied |= {name: self._give[name].tensor.nbytes for name in clashing}
        copied |= {name: self._take[name].tensor.nbytes for name in find_sharing(self._take)}
        if copied and planned + sum(copied.values()) > cap:
            name = max(copied, key=lambda each: (copied[each], each))
            raise PlanError(
                f"{_DOING} {self.transfer.num_tensors} tensors: rank {rank} must copy {len(copied)} of them whole, "
                f"such as {name!r}, {sum(copied.values())} bytes beside {planned} of staging, expected at most {cap} "
                "together; make them contiguous, and give and take different memory"
            )

    def prepare(self) -> None:
        """Look up where everything is; called before a run, does the work once."""
        if self._memories is None:
            transfer = self.transfer
            give = dict(self._give)
            partial = {move.name for move in transfer.reduction.moves} if transfer.reduction else set()
            whole_values = {name: piece for name, piece in give.items() if name not in partial}
            for name in find_clashes(whole_values, self._take):
                clone = give[name].tensor.clone()
                self._clones.append((give[name].tensor, clone))
                give[name] = replace(give[name], tensor=clone)
            sums = transfer.reduction.moves if transfer.reduction else ()
            wholes = self._make_wholes()
            moves, alike = transfer.plan.moves, transfer.alike
            given, taken = (
                Regions(give | wholes, moves, alike),
                Regions(self._take, moves, alike, find_sharing(self._take)),
            )
            copies = [each for copy in self._todo.copies for each in taken.plan_copy(given, copy.tensor, copy.box)]
            self._memories = _Memories(Regions(self._give, sums), Regions(wholes, sums), given, taken, tuple(copies))
            self._is_fresh = True
            return
        if self._is_fresh:
            return
        for original, clone in self._clones:
            clone.copy_(original)
        memories = self._memories
        for memory in (memories.addends, memories.give, memories.take):
            memory.refresh()

    def _make_wholes(self) -> dict[str, Piece]:
        """Buffers for the whole values of partial sums that end on this rank."""
        reduction = self.transfer.reduction
        wholes = {}
        for move, layout in zip(reduction.moves, reduction.wholes, strict=True) if reduction else ():
            mine = layout.shards_of(group_rank(self._group))
            size = sum(shard.box.size for shard in mine)
            like = self._give.get(move.name)
            buffer = torch.empty(size, dtype=torch_dtype(layout.dtype), device=like.tensor.device if like else None)
            shards = tuple(Shard(0, shard.box, shard.offset, shard.strides) for shard in mine)
            wholes[move.name] = Piece(buffer, layout.global_shape, shards)
            self._fixed_bytes += buffer.nbytes
        return wholes

    def run(self, tag: int) -> Moved:
        """Carry the transfer out once, under a tag that all ranks agreed on; they must all call this.

        What is taken has a new version then: autograd refuses a graph that has saved it before.
        """
        increment_version([piece.tensor for piece in self._take.values()])
        return self._run(tag, self.transfer.last_rank)

    def run_unconfirmed(self, tag: int) -> Moved:
        """The same for ranks that need not know how the others fare: ends when this rank has given and taken all.

        Only ranks that give or take call it. Runs under one tag follow each other in the same order on all of them;
        over NCCL, where there are no tags, all runs do. There it has only queued its messages when it returns:
        `remesh.comm.gather.check_end` finds what became of them.
        """
        return self._run(tag, None)

    def _run(self, tag: int, last: int | None) -> Moved:
        """``last`` is the rank that has everything last, as far as the plan can show; None for an end of one's own."""
        rank = group_rank(self._group)
        transfer = self.transfer
        started_s = time.perf_counter()
        with torch.no_grad():
            self.prepare()
            self._is_fresh = False
            staging = Staging(self._todo.staging_bytes)
            staging.add(self._fixed_bytes)
            link = Link(self._group, tag, staging)
            seconds = self._carry(link, rank, last) - started_s
        return Moved(
            bytes_by_pair=BytesByPair(lambda: transfer.bytes_by_pair),
            bytes_local=transfer.bytes_copied,
            seconds=seconds,
            lower_bound_bytes=transfer.lower_bound_bytes,
            num_rounds=transfer.num_rounds,
            missing=dict(transfer.missing),
            planned_staging_bytes=self._todo.staging_bytes,
            peak_staging_bytes=staging.peak_bytes,
            given=tuple(link.given),
            taken=tuple(link.taken),
        )

    def _carry(self, link: Link, rank: int, last: int | None) -> float:
        """Move all messages; returns the time at which the last byte arrived."""
        assert self._memories is not None
        give, take = self._memories.give, self._memories.take
        transfer = self.transfer
        todo = self._todo
        mover = Mover(todo, give, take, link)
        copies = iter(self._memories.copies)
        has_summed = False
        try:
            farewell = self._expect_farewell(link.tag, last)
            if transfer.reduction is not None:
                summer = Summer(transfer.reduction, self._memories.addends, self._memories.wholes, link)
                summer.join_own(rank)
                summer.carry(todo.sum_steps)
            has_summed = True
            mover.carry(todo.steps, () if todo.relayed else copies)
            _run_all(copies)
            overwritten = take.flush()
            if last is not None:
                check_end(self._group, _DOING)
            finished_s = time.perf_counter()
            is_wrong = self._end(farewell, bool(overwritten), is_asked=link.is_queued and last is not None)
        except RuntimeError as raised:
            if is_of_own_device(raised):
                break_off(self._group)
                raise
            if has_summed:
                _run_all(copies)
            take.flush()
            # Over NCCL no rank knows which of the messages that were waited for have come.
            arrived = Counter[int]() if link.is_queued else mover.num_arrived
            unfilled = self._unfilled(arrived, has_summed)
            raise _unfilled_error(peer_error(_DOING, self._group, raised), unfilled) from raised
        if is_wrong:
            raise _overwritten_error(overwritten)
        return finished_s

    def _expect_farewell(self, tag: int, last: int | None) -> Farewell | None:
        """The end of the run for all ranks; None where there is none, or no other rank."""
        if last is None or group_size(self._group) == 1 or is_queued(self._group):
            return None
        return Farewell(self._group, tag + _NUM_TAGS, last)

    def _end(self, farewell: Farewell | None, is_wrong: bool, *, is_asked: bool) -> bool:
        """Wait until all ranks are done, if they report to each other; whether one of them reported something wrong."""
        if farewell is not None:
            return farewell.wait(is_wrong)
        return any(all_gather_json(is_wrong, self._group)) if is_asked else is_wrong

    def _unfilled(self, arrived: Counter[int], has_summed: bool) -> list[str]:
        """Tensors that this rank wants and has not all of, when so many of each chunk have arrived."""
        plan = self.transfer.plan
        todo = self._todo
        expected = Counter(step.message.chunk for step in todo.steps if step.act is Act.TAKE)
        lacking = [(part.tensor, part.box) for n in expected - arrived for part in todo.chunks[n].parts]
        if not has_summed:  # what would have been copied may be such a sum
            lacking += [(copy.tensor, copy.box) for copy in todo.copies]
        names = [self.transfer.names_of(move.name) for move in plan.moves]
        return sorted({name for tensor, box in lacking for name in unstack(names[tensor], box)[0]})


def _run_all(copies: Iterable[LocalCopy]) -> None:
    for copy in copies:
        copy.run()


def propose_tag(group: Group) -> int:
    """What this rank proposes as the number of the next run on a group; never the same again."""
    return next(_next_tags.setdefault(id(group) if group is not None else 0, itertools.count()))


def settle_tag(proposed: Sequence[int]) -> int:
    """The tag that all ranks use, from what each of them proposed: no earlier run has it."""
    return _FIRST_TAG + max(proposed) % _NUM_TAGS


def _unfilled_error(error: PeerError, unfilled: Sequence[str]) -> UnfilledError:
    listed = ", ".join(map(repr, unfilled[:_MAX_LISTED])) + (", ..." if len(unfilled) > _MAX_LISTED else "")
    told = f"; unfilled on this rank: {listed}" if unfilled else "; all tensors that this rank wanted are filled"
    return UnfilledError(f"{error}{told}", unfilled)


def _overwritten_error(names: Sequence[str]) -> PlanError:
    """For all ranks: that of several tensors in one memory only some are there; ``names`` are this rank's."""
    where = f"tensors {', '.join(map(repr, names[:_MAX_LISTED]))}" if names else "on another rank some tensors"
    return PlanError(
        f"{_DOING}: {where} are not what was given for them, since others were taken into the same memory with other "
        "values, expected equal values for all that share memory; take each into memory of its own (untie the model's "
        "weights), or leave one of them out"
    )


def _check_digests(digests: Sequence[str]) -> None:
    # Every rank looks at the same list, so every rank raises the same error.
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise PlanError(
            f"{_DOING}: expected one plan on all {len(digests)} ranks, found digest {digests[0][:16]} on rank 0 and "
            f"{digests[other][:16]} on rank {other}; plan on every rank from the same gathered moves"
        )
