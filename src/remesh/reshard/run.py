"""How do the bytes get there? A plan carried out over torch.distributed point-to-point messages.

Each rank, in steps:

1. See that its tensors are what the plan was made for. All ranks compare the plan's digest and tell each other what
   went wrong so far; nothing moves unless all are ready.
2. Copy what it holds itself.
3. Go through its messages in the order of rounds. With a window of W rounds, here 2 (`p` = receive posted, `w` =
   waited for, `s` = sent; rounds run to the right, time runs down):

       round    0    1    2    3
                ps   p    p              receives are posted W rounds ahead, then round 0 is sent
                w    s         p         what arrived in round 0 can be passed on in round 1
                     w    s         p

A receive is posted before it is due, so a peer that is ahead does not wait for one that is merely busy. At most
2 W + 1 receives and W + 1 sends are under way on a rank, which bounds its staging memory.

Why nobody waits for ever: take the ranks whose current round is the lowest. Each of them waits for a message of an
earlier round, or to receive in this one. The other end of an earlier message has passed its round, so both halves are
posted and it completes; after that all of these ranks send, and the messages of this round complete as well.

With NCCL, where operations start in the order of a stream, the two messages of a rank in a round go out as a batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from remesh.errors import PlanError
from remesh.layout import Box
from remesh.layout.from_torch import Piece
from remesh.reshard.exchange import Group, gather_from, group_device, group_rank, group_size, peer_error
from remesh.reshard.memory import Memory, check_pieces, unalias
from remesh.reshard.plan import Plan
from remesh.reshard.program import Copy, Message

_WINDOW_ROUNDS = 4
"""How many rounds ahead receives are posted: hides latency, bounds staging."""
_DOING = "resharding"
_TAG = 0x5E54
"""Keeps these messages apart from the caller's own on the same group."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a run has moved."""

    bytes_by_pair: dict[tuple[int, int], int]
    """Bytes sent, by (giver, taker), between all ranks of the group; the same on every rank."""
    bytes_local: int
    """Bytes copied within the memory of a rank, over all ranks."""
    seconds: float
    """Time on this rank from the agreement on the plan to its last byte."""
    lower_bound_bytes: int
    """Bytes that the busiest NIC had to carry at the least."""
    num_rounds: int
    """Rounds of the schedule."""
    missing: dict[str, tuple[Box, ...]]
    """Boxes that nobody held and that keep their values, by tensor; empty unless the caller allowed it."""


def run_plan(plan: Plan, give: Mapping[str, Piece], take: Mapping[str, Piece], group: Group = None) -> Moved:
    """Carry out a plan: fill the tensors of ``take``, on all ranks, from those of ``give``.

    Called by every rank of the group with the same plan and its own pieces; ranks of the plan are ranks of the group.
    Blocks until this rank has sent and received all its messages. Raises the same error on all ranks before the first
    byte when plans differ or a piece does not fit its plan; raises `PeerError` within the group's timeout when a
    rank dies on the way, and then what was taken so far is undefined.
    """
    rank = group_rank(group)
    given: dict[str, Piece] = {}

    def ready() -> str:
        if plan.host_of and max(plan.host_of) >= group_size(group):
            raise PlanError(
                f"{_DOING} {len(plan.moves)} tensors: the plan is for ranks up to {max(plan.host_of)}, found a group "
                f"of {group_size(group)}; plan for this group"
            )
        check_pieces(plan, give, take, rank)
        given.update(unalias(give, take))
        return plan.digest

    _check_digests(gather_from(ready, group, _DOING))
    started_s = time.perf_counter()
    with torch.no_grad():
        _Carrier(plan, given, take, group).run(rank)
    return Moved(
        bytes_by_pair=dict(plan.bytes_by_pair),
        bytes_local=plan.bytes_copied,
        seconds=time.perf_counter() - started_s,
        lower_bound_bytes=plan.lower_bound_bytes,
        num_rounds=plan.num_rounds,
        missing=dict(plan.missing),
    )


def _check_digests(digests: Sequence[str]) -> None:
    # Every rank looks at the same list, so every rank raises the same error.
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise PlanError(
            f"{_DOING}: expected one plan on all {len(digests)} ranks, found digest {digests[0][:16]} on rank 0 and "
            f"{digests[other][:16]} on rank {other}; plan on every rank from the same gathered moves"
        )


class _Carrier:
    """One rank at work on a plan."""

    def __init__(self, plan: Plan, give: Mapping[str, Piece], take: Mapping[str, Piece], group: Group) -> None:
        names = [move.name for move in plan.moves]
        self._plan = plan
        self._group = group
        self._device = group_device(group)
        self._give = Memory(give, names)
        self._take = Memory(take, names)
        self._taken_in: dict[int, int] = {}
        """Round in which each chunk that this rank takes arrives."""
        self._passing_on: dict[int, int] = {}
        """How often this rank has yet to send each chunk that it takes."""
        self._arrived: dict[int, torch.Tensor] = {}
        """Bytes of the chunks that arrived and are still to be passed on."""

    def run(self, rank: int) -> None:
        program = self._plan.program_of(rank)
        self._taken_in = {message.chunk: message.round for message in program.takes}
        for message in program.gives:
            if message.chunk in self._taken_in:
                self._passing_on[message.chunk] = self._passing_on.get(message.chunk, 0) + 1
        for copy in program.copies:
            self._copy(copy)
        try:
            self._carry(program.gives, program.takes)
        except RuntimeError as raised:
            raise peer_error(_DOING, self._group, raised) from raised
        self._take.flush()

    def _carry(self, gives: Sequence[Message], takes: Sequence[Message]) -> None:
        if self._device.type == "cpu":
            self._run_windowed(gives, takes)
        else:
            self._run_batched(gives, takes)

    def _run_windowed(self, gives: Sequence[Message], takes: Sequence[Message]) -> None:
        to_post = deque(takes)
        posted: deque[tuple[Message, torch.Tensor, Any]] = deque()
        sent: deque[tuple[torch.Tensor, Any]] = deque()

        def post_until(round_: int) -> None:
            while to_post and to_post[0].round <= round_:
                message = to_post.popleft()
                buffer = self._buffer_to_take(message)
                work = dist.irecv(buffer, group=self._group, group_src=message.giver, tag=_TAG)
                posted.append((message, buffer, work))

        def wait_until(round_: int) -> None:
            while posted and posted[0][0].round <= round_:
                message, buffer, work = posted.popleft()
                work.wait()
                self._take_in(message, buffer)

        for message in gives:
            post_until(message.round + _WINDOW_ROUNDS)
            wait_until(max(message.round - _WINDOW_ROUNDS, self._taken_in.get(message.chunk, -1)))
            while len(sent) > _WINDOW_ROUNDS:
                sent.popleft()[1].wait()
            buffer = self._buffer_to_give(message)
            work = dist.isend(buffer, group=self._group, group_dst=message.taker, tag=_TAG)
            sent.append((buffer, work))
        while to_post or posted:
            now = posted[0][0].round if posted else to_post[0].round
            post_until(now + _WINDOW_ROUNDS)
            wait_until(now)
        while sent:
            sent.popleft()[1].wait()

    def _run_batched(self, gives: Sequence[Message], takes: Sequence[Message]) -> None:
        gives_in = {message.round: message for message in gives}
        takes_in = {message.round: message for message in takes}
        for round_ in sorted(gives_in.keys() | takes_in.keys()):
            ops = []
            taking = takes_in.get(round_)
            if taking is not None:
                arriving = self._buffer_to_take(taking)
                ops.append(dist.P2POp(dist.irecv, arriving, group=self._group, group_peer=taking.giver))
            giving = gives_in.get(round_)
            if giving is not None:
                leaving = self._buffer_to_give(giving)
                ops.append(dist.P2POp(dist.isend, leaving, group=self._group, group_peer=giving.taker))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            if taking is not None:
                self._take_in(taking, arriving)

    def _copy(self, copy: Copy) -> None:
        source = self._give.regions(copy.tensor, copy.box)[0]
        for region in self._take.regions(copy.tensor, copy.box):
            if region.data_ptr() != source.data_ptr() or region.stride() != source.stride():
                region.copy_(source)

    def _buffer_to_give(self, message: Message) -> torch.Tensor:
        chunk = self._plan.chunks[message.chunk]
        if message.chunk in self._taken_in:
            self._passing_on[message.chunk] -= 1
            last = self._passing_on[message.chunk] == 0
            return self._arrived.pop(message.chunk) if last else self._arrived[message.chunk]
        buffer = self._give.direct(chunk, self._device)
        if buffer is None:
            buffer = torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
            self._give.pack(chunk, buffer)
        return buffer

    def _buffer_to_take(self, message: Message) -> torch.Tensor:
        chunk = self._plan.chunks[message.chunk]
        buffer = self._take.direct(chunk, self._device)
        if buffer is not None:
            return buffer
        return torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)

    def _take_in(self, message: Message, buffer: torch.Tensor) -> None:
        chunk = self._plan.chunks[message.chunk]
        if self._take.direct(chunk, self._device) is None:
            self._take.unpack(chunk, buffer)
        if message.chunk in self._passing_on:
            self._arrived[message.chunk] = buffer
