"""Transfer: a plan, the sums that come before it, and how much memory a run of both may take.

Definitions. A *transfer* is a plan together with the reduction of what is held as partial sums (`reduction`), the
window of its steps (`steps`), and the *staging* that these need on each rank: message buffers, and whole values of
partial sums until they have moved on. Staging is a promise: a run measures what it took and never takes more.

With a cap on staging, the transfer has the largest chunks that fit, then the widest window. Every rank finds the same
ones, because everything here is a function of the arguments.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypedDict

from remesh.foundation.errors import Error, PlanError
from remesh.layout import Box
from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Copy, Message
from remesh.resharding.model.tasks import Alike, Missing, SumOrder, TensorMove, stack_moves, unstack
from remesh.resharding.planning.plan import Plan
from remesh.resharding.planning.planner import AUTO, DEFAULT_CHUNK_BYTES, MIN_CHUNK_BYTES, check_hosts, plan_reshard
from remesh.resharding.planning.rank_steps import DEFAULT_WINDOW, Step, choose_window, compute_peak_bytes, compute_steps
from remesh.resharding.planning.reduction import Reduction, plan_reduction
from remesh.resharding.schedule.chunks import Chunk, KeptChunks
from remesh.resharding.schedule.grid_rows import GridRows

_MIN_WINDOW = 1
_SHORTEST_CHUNK_BYTES = 4 << 10
_SMALL_STATE_BYTES = 1 << 20
_MANY_MESSAGES = 1 << 15
_LONG_CHUNK_BYTES = 256 << 10
"""Chunks shorter than this lose more time to their latency than a narrower window does."""


class PlanOptions(TypedDict, total=False):
    """The options of a plan."""

    host_of: Mapping[int, str] | None
    """Host of every rank of the group: ranks with equal hosts share a NIC. By default the machine's own names."""
    chunk_bytes: int
    """Size of the largest message."""
    missing: Missing
    """What to do about wanted boxes that no rank holds."""
    sum_order: SumOrder
    """How addends of partial sums are joined; in ascending order by default."""
    max_staging_bytes: int | None
    """Most bytes of staging on a rank; where ranks differ, the least of all is kept to by all."""
    network: Network | None
    """Rates of the links; by default all NICs are equal."""
    strategy: str
    """Name of a strategy; by default ours."""


@dataclass(frozen=True)
class RankSteps:
    """One rank's part of a transfer, down to its steps."""

    copies: tuple[Copy, ...]
    """Slices that it copies within its memory."""
    steps: tuple[Step, ...]
    """Of the plan."""
    sum_steps: tuple[Step, ...]
    """Of the reduction, which comes before."""
    chunks: Mapping[int, Chunk]
    """What the messages of the plan's steps carry, by number; made when they are first looked at."""
    relayed: Mapping[int, int]
    """How often it passes on each chunk of the plan that it takes."""
    staging_bytes: int
    """Most bytes of staging that it needs."""


@dataclass(frozen=True)
class Transfer:
    """All that happens between two layouts of a state, partial sums included; the same on every rank."""

    plan: Plan
    """Moves of whole values."""
    reduction: Reduction | None = None
    """How partial sums become whole before; None without any."""
    window: int = DEFAULT_WINDOW
    """How many messages of a rank may be on their way, each way. Invariant: >= 1."""
    max_staging_bytes: int | None = None
    """Cap on the staging of a rank; None without. Invariant: no rank needs more."""
    alike: Alike = field(default_factory=dict)
    """The tensors that moves of the plan stand for, where they stand for several (`remesh.resharding.model.tasks`)."""
    _rank_steps: dict[int, RankSteps] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, plan: Plan, reduction: Reduction | None = None) -> Transfer:
        """The transfer of a plan, with the window that suits its chunks."""
        sums = [chunk.nbytes for chunk in reduction.chunks] if reduction else []
        return cls(plan, reduction, choose_window(max([plan.chunks.largest_bytes, *sums])))

    def __post_init__(self) -> None:
        if self.window < _MIN_WINDOW:
            raise PlanError(
                f"making a transfer: its window is {self.window} messages, expected at least "
                f"{_MIN_WINDOW}; two ranks that send to each other would wait forever"
            )
        if self.max_staging_bytes is not None and self.staging_bytes > self.max_staging_bytes:
            raise PlanError(
                f"making a transfer: a rank needs {self.staging_bytes} bytes of staging, expected at most "
                f"{self.max_staging_bytes}; use shorter chunks, or raise the cap"
            )

    @cached_property
    def moves(self) -> tuple[TensorMove, ...]:
        """What is moved as it is held and wanted: partial sums as such."""
        partial = {move.name: move for move in self.reduction.moves} if self.reduction else {}
        return tuple(partial.get(move.name, move) for move in self.plan.moves)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have something to do, ascending."""
        busy = set(self.plan.ranks)
        busy |= {rank for m in (self.reduction.messages if self.reduction else ()) for rank in (m.giver, m.taker)}
        busy |= {leg.rank for leg in self.reduction.legs} if self.reduction else set()
        return tuple(sorted(busy))

    @cached_property
    def staging_bytes(self) -> int:
        """Most bytes of staging that any rank needs; of a plan by rule, an upper limit."""
        if isinstance(self.plan.rows, GridRows) and self.reduction is None:
            # A window each way, and one that was taken and is passed on at once.
            return (2 * self.window + 1) * self.plan.chunks.largest_bytes
        return max((self.steps_of(rank).staging_bytes for rank in self.ranks), default=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal; equal exactly when the transfers are."""
        told = [self.plan.digest, self.reduction.to_json() if self.reduction else None, self.window, self.alike]
        return hashlib.sha256(json.dumps(told, separators=(",", ":")).encode()).hexdigest()

    @cached_property
    def bytes_by_pair(self) -> Mapping[tuple[int, int], int]:
        """Bytes sent in both stages, by (giver, taker), in ascending order of pairs."""
        total = dict(self.plan.bytes_by_pair)
        for pair, nbytes in (self.reduction.bytes_by_pair() if self.reduction else {}).items():
            total[pair] = total.get(pair, 0) + nbytes
        return dict(sorted(total.items()))

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that no schedule can keep off the busiest NIC; of partial sums both stages, and then they alone."""
        return self.reduction.lower_bound_bytes if self.reduction else self.plan.lower_bound_bytes

    @cached_property
    def busiest_nic_bytes(self) -> int:
        """Bytes of both stages through the busiest host's NICs in its busier direction."""
        if self.reduction is None:
            return self.plan.busiest_nic_bytes
        through = Counter[tuple[str, str]]()
        hosts = self.reduction.host_of
        for (giver, taker), nbytes in self.bytes_by_pair.items():
            if hosts[giver] != hosts[taker]:
                through[hosts[giver], "out"] += nbytes
                through[hosts[taker], "in"] += nbytes
        return max(through.values(), default=0)

    @property
    def certified_ratio(self) -> float:
        """Bytes of both stages through the busiest NIC over the lower bound; 1.0 also when nothing must cross."""
        if self.reduction is None:
            return self.plan.certified_ratio
        return self.busiest_nic_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0

    @cached_property
    def last_rank(self) -> int:
        """The rank that has everything last, as far as sums can show: it takes most, and passes on least of that.

        Where messages are too many to go through all, only what ranks take counts.
        """
        taken, given = Counter[int](), Counter[int]()
        if self.plan.rows.num_messages > _MANY_MESSAGES:
            taken.update(self.plan.rows.bytes_taken())
        else:
            for (giver, taker), nbytes in self.bytes_by_pair.items():
                given[giver] += nbytes
                taken[taker] += nbytes
        return max(taken, key=lambda rank: (taken[rank], -given[rank], rank), default=0)

    @cached_property
    def bytes_copied(self) -> int:
        """Bytes copied inside the memory of a rank, over all ranks."""
        return self.plan.bytes_copied

    @cached_property
    def num_rounds(self) -> int:
        """Rounds of both stages."""
        return self.plan.num_rounds + (self.reduction.num_rounds if self.reduction else 0)

    @cached_property
    def missing(self) -> Mapping[str, tuple[Box, ...]]:
        """Boxes that are wanted but held by no rank, by tensor."""
        found: dict[str, list[Box]] = {}
        for stack, boxes in self.plan.missing.items():
            for stacked in boxes:
                names, box = unstack(self.names_of(stack), stacked)
                for name in names:
                    found.setdefault(name, []).append(box)
        return {name: tuple(found[name]) for name in sorted(found)}

    def names_of(self, move: str) -> tuple[str, ...]:
        """The tensors that the move of this name stands for."""
        return self.alike.get(move, (move,))

    @property
    def num_tensors(self) -> int:
        """Tensors of all moves."""
        return sum(len(self.names_of(move.name)) for move in self.plan.moves)

    def steps_of(self, rank: int) -> RankSteps:
        """What this rank does; worked out once."""
        if rank not in self._rank_steps:
            self._rank_steps[rank] = self._compute_steps(rank)
        return self._rank_steps[rank]

    @cached_property
    def _sum_messages(self) -> tuple[dict[int, list[Message]], dict[int, list[Message]]]:
        return group_by_rank(self.reduction.messages if self.reduction else ())

    def _compute_steps(self, rank: int) -> RankSteps:
        program, sizes = self.plan.program_of(rank), self.plan.rows.chunk_bytes_of(rank)
        taken_in = {message.chunk: message.round for message in program.takes}
        relayed: dict[int, int] = {}
        for message in program.gives:
            if message.chunk in taken_in:
                relayed[message.chunk] = relayed.get(message.chunk, 0) + 1
        steps = compute_steps(program.gives, program.takes, taken_in, self.window)
        peak = compute_peak_bytes(steps, sizes, {chunk: [chunk] * n for chunk, n in relayed.items()})
        sum_steps, sum_peak, kept = self._compute_sum_steps(rank)
        chunks = KeptChunks(self.plan.chunks)
        return RankSteps(program.copies, steps, sum_steps, chunks, relayed, kept + max(peak, sum_peak))

    def _compute_sum_steps(self, rank: int) -> tuple[tuple[Step, ...], int, int]:
        """Steps of the reduction, peak of their buffers, bytes of whole values that stay until the end."""
        reduction = self.reduction
        if reduction is None:
            return (), 0, 0
        gives, takes = (by_rank.get(rank, []) for by_rank in self._sum_messages)
        taken_in = {message.chunk: message.round for message in takes}
        needs = {m.chunk: taken_in[m.chunk - 1] for m in gives if reduction.continues(m.chunk)}
        steps = compute_steps(gives, takes, needs, self.window)
        sizes = [reduction.chunks[leg.chunk].nbytes for leg in reduction.legs]
        peak = compute_peak_bytes(steps, sizes, {leg - 1: [leg] for leg in needs})
        # A path that stays on one rank is joined in a buffer of its own before any message.
        alone = (leg.chunk for n, leg in enumerate(reduction.legs) if leg.rank == rank and is_alone(reduction, n))
        peak = max([peak, *(reduction.chunks[chunk].nbytes for chunk in alone)])
        return steps, peak, sum(whole.nbytes_of(rank) for whole in reduction.wholes)


def group_by_rank(messages: Sequence[Message]) -> tuple[dict[int, list[Message]], dict[int, list[Message]]]:
    """The messages that each rank sends, and those that it receives, in order."""
    gives: dict[int, list[Message]] = {}
    takes: dict[int, list[Message]] = {}
    for message in messages:
        gives.setdefault(message.giver, []).append(message)
        takes.setdefault(message.taker, []).append(message)
    return gives, takes


def is_alone(reduction: Reduction, leg: int) -> bool:
    """Whether one rank holds all addends of the leg's chunk, so that nothing has to be sent to sum them."""
    return reduction.ends(leg) and not reduction.continues(leg)


def plan_transfer(moves: Sequence[TensorMove], host_of: Mapping[int, str], options: PlanOptions) -> Transfer:
    """The transfer that performs all moves; the same on every rank for the same arguments.

    ``host_of`` here wins over that of the options. Raises `PlanError` for what cannot be moved, and when the cap on
    staging has no room for a single chunk.
    """
    cap = options.get("max_staging_bytes")
    if cap is None:
        return _plan_once(moves, host_of, options, options.get("chunk_bytes", DEFAULT_CHUNK_BYTES))
    needed = shortest = 0
    whole_bytes = sum(move.src.nbytes for move in moves)
    for chunk_bytes, windows in _attempts(cap, options.get("chunk_bytes"), whole_bytes):
        made = _plan_once(moves, host_of, options, chunk_bytes)
        for window in windows:
            needed = Transfer(made.plan, made.reduction, window).staging_bytes
            if needed <= cap:
                return Transfer(made.plan, made.reduction, window, cap)
        shortest = min(chunk_bytes, made.plan.chunks.largest_bytes)
    raise PlanError(
        f"planning {len(moves)} moves: max_staging_bytes is {cap}, too small for chunks of {shortest} bytes, the "
        f"shortest that are tried; expected at least {needed}; raise the cap, or leave it out"
    )


def plan_stacked(moves: Sequence[TensorMove], host_of: Mapping[int, str], options: PlanOptions) -> Transfer:
    """The same, where tensors that are alike are planned as one; for callers that ask `Transfer.names_of` for tensors.

    An error names the tensors themselves.
    """
    stacked, alike = stack_moves(moves)
    if alike:
        with contextlib.suppress(Error):
            return replace(plan_transfer(stacked, host_of, options), alike=alike)
    return plan_transfer(moves, host_of, options)


def _plan_once(
    moves: Sequence[TensorMove], host_of: Mapping[int, str], options: PlanOptions, chunk_bytes: int
) -> Transfer:
    missing = options.get("missing", Missing.REFUSE)
    partial = sorted((move for move in moves if move.src.partial is not None), key=lambda move: move.name)
    reduction = None
    if partial:
        check_hosts(moves, host_of)
        order = options.get("sum_order", SumOrder.ASCENDING)
        reduction = plan_reduction(partial, host_of, chunk_bytes, missing, order)
        wholes = {move.name: whole for move, whole in zip(partial, reduction.wholes, strict=True)}
        moves = [TensorMove(m.name, wholes[m.name], m.dst) if m.name in wholes else m for m in moves]
    plan = plan_reshard(
        moves,
        host_of,
        chunk_bytes=chunk_bytes,
        missing=missing,
        network=options.get("network"),
        strategy=options.get("strategy", AUTO),
    )
    return Transfer.of(plan, reduction)


def _attempts(cap: int, asked: int | None, whole_bytes: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Chunk sizes to try, each with its windows, longest and widest first."""
    windows = (DEFAULT_WINDOW, 4, 2, _MIN_WINDOW)
    if asked is not None:
        yield asked, windows
        return
    # So short that chunks would be without number is for small states only.
    floor = MIN_CHUNK_BYTES if whole_bytes < _SMALL_STATE_BYTES else _SHORTEST_CHUNK_BYTES
    chunk_bytes = max(floor, min(DEFAULT_CHUNK_BYTES, cap // 2))
    while True:
        yield chunk_bytes, windows[:1] if chunk_bytes > _LONG_CHUNK_BYTES else windows
        if chunk_bytes == floor:
            return
        chunk_bytes = max(floor, chunk_bytes // 2)
