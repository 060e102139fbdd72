"""Carriers: one rank at work on its steps, over torch.distributed point-to-point messages.

A *carrier* goes through the steps of a stage (`planning.steps`). What its messages mean is left to two kinds:

- `Mover` carries chunks of whole values: from memory or from what arrived, into memory, and on;
- `Summer` carries running sums: the rank's own addends are joined with what arrived, and the result goes on.

With NCCL, where operations start in the order of a stream, the two messages of a rank in a round go out as a batch.
Batches are all in the one communicator of the group; a send or receive by itself would make one for each pair of ranks.
torch opens a group of NCCL's operations for a batch, and leaves it open where the batch raises. Such a group belongs to
the thread: nothing that the thread queues later, on whatever communicator, would ever start, and no error would show
it. So batches have a thread of their own, which ends with the run.

Every buffer that is not the caller's memory comes from `Staging`, which counts what is alive: a buffer counts until
nothing refers to it any more, whatever the steps expect.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from remesh.comm.gather import Group, group_device, is_queued
from remesh.device.streams import run_apart
from remesh.resharding.model.program import Message, Timing
from remesh.resharding.planning.rank_steps import Act, Step
from remesh.resharding.planning.reduction import Reduction
from remesh.resharding.planning.transfer import RankSteps, is_alone
from remesh.resharding.running.regions import LocalCopy, Regions

_JOIN: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class Staging:
    """Byte buffers of one run on one rank, and how many bytes of them are alive.

    Memory that is free again is kept and handed out once more, because new memory costs as much as a copy.
    """

    def __init__(self, most_bytes: int) -> None:
        self.alive_bytes = 0
        """Bytes of buffers that are still referred to, and of memory that is kept."""
        self.peak_bytes = 0
        """Most that ``alive_bytes`` has been."""
        self._most_bytes = most_bytes
        """Before more than this is alive, what is kept is let go."""
        self._kept: dict[int, list[torch.Tensor]] = {}
        """Free memory, by size."""

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """A buffer; its memory is free again when nothing refers to it any more."""
        kept = self._kept.get(nbytes)
        memory = kept.pop() if kept else self._allocate(nbytes, device)
        buffer = memory.view(-1)
        weakref.finalize(buffer, self._kept.setdefault(nbytes, []).append, memory).atexit = False
        return buffer

    def add(self, nbytes: int) -> None:
        """Count bytes that were allocated, or freed when negative."""
        self.alive_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        for size, kept in self._kept.items():
            while kept and self.alive_bytes + nbytes > self._most_bytes:
                kept.pop()
                self.add(-size)
        self.add(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class Link:
    """The channel of one run: the process group, a tag of its own, and a clock."""

    def __init__(self, group: Group, tag: int, staging: Staging) -> None:
        self.group = group
        self._process_group: Any = group or dist.group.WORLD
        self.tag = tag
        self.device = group_device(group)
        self.is_queued = is_queued(group)
        """Whether messages have only been queued when they have been waited for."""
        self.staging = staging
        self.given: list[Timing] = []
        """Messages that this rank has sent."""
        self.taken: list[Timing] = []
        """Messages that this rank has received."""
        self._started_s = time.perf_counter()

    def now_s(self) -> float:
        """Seconds since the run began on this rank."""
        return time.perf_counter() - self._started_s

    def post(self, message: Message, buffer: torch.Tensor) -> Any:
        """Begin to receive."""
        return self._process_group.recv([buffer], message.giver, self.tag)

    def give(self, message: Message, buffer: torch.Tensor) -> Any:
        """Begin to send."""
        return self._process_group.send([buffer], message.taker, self.tag)


class Carrier:
    """One rank at work on the messages of one stage."""

    stage = 0
    """Number of the stage in timings."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def carry(self, steps: Sequence[Step], meanwhile: Iterable[LocalCopy] = ()) -> None:
        """Go through the steps; raises RuntimeError when a peer is gone.

        Whenever it would wait for others it makes one of the copies ``meanwhile``, as long as there are any.
        """
        if self._link.is_queued:
            run_apart(lambda: self._run_batched(steps))
        else:
            self._run_windowed(steps, iter(meanwhile))

    def _buffer_to_give(self, message: Message) -> torch.Tensor:
        raise NotImplementedError

    def _buffer_to_take(self, message: Message) -> torch.Tensor:
        raise NotImplementedError

    def _take_in(self, message: Message, buffer: torch.Tensor) -> None:
        raise NotImplementedError

    def _run_windowed(self, steps: Sequence[Step], meanwhile: Iterator[LocalCopy]) -> None:
        link = self._link
        posted: dict[int, tuple[torch.Tensor, Any, float]] = {}  # by round
        sent: deque[tuple[torch.Tensor, Any, float]] = deque()
        for step in steps:
            message = step.message
            if step.act in (Act.TAKE, Act.SETTLE):
                for copy in itertools.islice(meanwhile, 1):
                    copy.run()
            if step.act is Act.POST:
                buffer = self._buffer_to_take(message)
                posted[message.round] = (buffer, link.post(message, buffer), link.now_s())
            elif step.act is Act.TAKE:
                buffer, work, begun_s = posted.pop(message.round)
                work.wait()
                link.taken.append(self._timing(message, buffer, begun_s))
                del work
                self._take_in(message, buffer)
            elif step.act is Act.GIVE:
                buffer = self._buffer_to_give(message)
                begun_s = link.now_s()
                sent.append((buffer, link.give(message, buffer), begun_s))
            else:
                buffer, work, begun_s = sent.popleft()
                work.wait()
                link.given.append(self._timing(message, buffer, begun_s))
                del work
            del buffer  # or it would outlive its last step, and count as staged

    def _run_batched(self, steps: Sequence[Step]) -> None:
        link = self._link
        takes = {step.message.round: step.message for step in steps if step.act is Act.TAKE}
        gives = {step.message.round: step.message for step in steps if step.act is Act.GIVE}
        for round_ in sorted(gives.keys() | takes.keys()):
            ops = []
            taking, giving = takes.get(round_), gives.get(round_)
            begun_s = link.now_s()
            if taking is not None:
                arriving = self._buffer_to_take(taking)
                ops.append(dist.P2POp(dist.irecv, arriving, group=link.group, group_peer=taking.giver))
            if giving is not None:
                leaving = self._buffer_to_give(giving)
                ops.append(dist.P2POp(dist.isend, leaving, group=link.group, group_peer=giving.taker))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            if giving is not None:
                link.given.append(self._timing(giving, leaving, begun_s))
            if taking is not None:
                link.taken.append(self._timing(taking, arriving, begun_s))
                self._take_in(taking, arriving)

    def _timing(self, message: Message, buffer: torch.Tensor, begun_s: float) -> Timing:
        ends = (message.giver, message.taker, buffer.numel())
        return Timing(self.stage, message.round, *ends, begun_s, self._link.now_s())


class Mover(Carrier):
    """Whole values in transit."""

    stage = 1

    def __init__(self, todo: RankSteps, give: Regions, take: Regions, link: Link) -> None:
        super().__init__(link)
        self._chunks = todo.chunks
        self._give = give
        self._take = take
        self._to_pass_on = dict(todo.relayed)
        """How often this rank has yet to send each chunk that it takes."""
        self._arrived: dict[int, torch.Tensor] = {}
        """Bytes of the chunks that arrived and are still to be passed on."""
        self.num_arrived: Counter[int] = Counter()
        """How often each chunk was put in its place."""

    def _buffer_to_give(self, message: Message) -> torch.Tensor:
        number = message.chunk
        if number in self._to_pass_on:
            self._to_pass_on[number] -= 1
            return self._arrived[number] if self._to_pass_on[number] else self._arrived.pop(number)
        chunk = self._chunks[number]
        buffer = self._give.direct(number, chunk, self._link.device)
        if buffer is None:
            buffer = self._link.staging.empty(chunk.nbytes, self._link.device)
            self._give.pack(number, chunk, buffer)
        return buffer

    def _buffer_to_take(self, message: Message) -> torch.Tensor:
        chunk = self._chunks[message.chunk]
        buffer = self._take.direct(message.chunk, chunk, self._link.device)
        return self._link.staging.empty(chunk.nbytes, self._link.device) if buffer is None else buffer

    def _take_in(self, message: Message, buffer: torch.Tensor) -> None:
        chunk = self._chunks[message.chunk]
        if self._take.direct(message.chunk, chunk, self._link.device) is None:
            self._take.unpack(message.chunk, chunk, buffer)
        self.num_arrived[message.chunk] += 1
        if message.chunk in self._to_pass_on:
            self._arrived[message.chunk] = buffer


class Summer(Carrier):
    """Running sums on their way. Chunks of messages are numbers of legs."""

    stage = 0

    def __init__(self, reduction: Reduction, addends: Regions, wholes: Regions, link: Link) -> None:
        super().__init__(link)
        self._reduction = reduction
        self._addends = addends
        self._wholes = wholes
        self._running: dict[int, torch.Tensor] = {}
        """Running sums, with this rank's addends in, that are still to be passed on; by leg."""

    def join_own(self, rank: int) -> None:
        """Sum the chunks of which this rank holds every addend; nothing is sent for them."""
        for number, leg in enumerate(self._reduction.legs):
            if leg.rank == rank and is_alone(self._reduction, number):
                self._finish(number, self._begin(number))

    def _buffer_to_give(self, message: Message) -> torch.Tensor:
        return self._running.pop(message.chunk) if message.chunk in self._running else self._begin(message.chunk)

    def _buffer_to_take(self, message: Message) -> torch.Tensor:
        chunk = self._reduction.chunks[self._reduction.legs[message.chunk].chunk]
        return self._link.staging.empty(chunk.nbytes, self._link.device)

    def _take_in(self, message: Message, buffer: torch.Tensor) -> None:
        leg = message.chunk + 1
        self._join(leg, buffer, self._reduction.legs[leg].addends)
        if self._reduction.ends(leg):
            self._finish(leg, buffer)
        else:
            self._running[leg] = buffer

    def _begin(self, leg: int) -> torch.Tensor:
        """The sum of this rank's addends, where a path begins."""
        own = self._reduction.legs[leg]
        chunk = self._reduction.chunks[own.chunk]
        buffer = self._link.staging.empty(chunk.nbytes, self._link.device)
        self._addends.pack(own.chunk, chunk, buffer, own.addends[0])
        self._join(leg, buffer, own.addends[1:], own.addends[0])
        return buffer

    def _join(self, leg: int, buffer: torch.Tensor, addends: Sequence[int], before: int | None = None) -> None:
        """Join addends of this rank to the running sum in ``buffer``."""
        reduction = self._reduction
        if before is None:
            before = reduction.legs[leg - 1].addends[-1]
        start = 0
        for part in reduction.chunks[reduction.legs[leg].chunk].parts:
            field = buffer[start : start + part.nbytes]
            start += part.nbytes
            move = reduction.moves[part.tensor]
            join = _JOIN[move.src.partial or "sum"]
            last = before
            for addend in addends:
                own = self._addends.values(part.tensor, part.box, addend)[0].to(field.device)
                running = field.view(own.dtype).view(own.shape)
                # The lower addend is the first operand, whichever way the path runs.
                join(*((own, running) if addend < last else (running, own)), out=running)
                last = addend

    def _finish(self, leg: int, buffer: torch.Tensor) -> None:
        """Keep the whole values in which a path ends."""
        reduction = self._reduction
        number = reduction.legs[leg].chunk
        self._wholes.unpack(number, reduction.chunks[number], buffer)
        for part in reduction.chunks[number].parts:
            if reduction.moves[part.tensor].src.partial == "avg":
                for whole in self._wholes.values(part.tensor, part.box):
                    whole.div_(reduction.num_addends[part.tensor])
