"""Process group of a program (`CarriedGroup`), with a real group in it that comes and goes.

A `CarriedGroup` counts and holds collectives by the gate, and forwards them to the real group in the same process. At
a cut the real group is destroyed, and with it its connections, listeners and threads; afterwards it is made again under
the same object, here or on another host. Only the calls that are named here are forwarded: for any other, torch's C++
side would fall back on the pretending backend beneath, which raises.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch.distributed import ProcessGroup, Store, Work

from remesh.carried.torch.anew import IN_PLACE, MOST_COPIED_BYTES, rule_of
from remesh.carried.torch.gate import Entrant, Gate
from remesh.carried.torch.queued import (
    BLOCK,
    BlockMessage,
    CoalescingBlock,
    MessagesWork,
    QueuedCollective,
    QueuedMessage,
    run_in_block,
)
from remesh.carried.torch.short import SHORT
from remesh.carried.torch.works import ENDED, Collective, CollectiveWork, MessageWork, is_short, see_under_way
from remesh.foundation.errors import ConfigError, PeerError
from remesh.foundation.torch_private import FakeProcessGroup

COLLECTIVES: Final = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
)
"""Methods of a group that are collectives and return a work."""
_REFUSED: Final = ("split_group", "merge_remote_group", "abort", "_get_sequence_number_for_group")
"""Methods that are refused by name: what they do has no counterpart after a cut."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the real group is made."""

    backend: str
    """The program's name for the backend: ``gloo``, ``nccl``."""
    kind: Any
    """torch's `BackendType`."""
    device: str
    make: Callable[[Store], Any]
    """Makes the real backend over a store."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Which process group it is, and which ranks are its members."""

    key: str
    """The same text on all members, and on no other group of the job."""
    members: tuple[int, ...]
    """World ranks in the order of the group."""
    rank: int
    """The rank of this process in the group."""


@dataclass(slots=True)
class _MessageStream:
    """Messages of one direction to or from one rank with one tag."""

    posted: int = 0
    ended: int = 0


@dataclass(slots=True)
class _Posted:
    """A message whose end has not been reported to the program yet, as far as is known."""

    work: MessageWork
    peer: int
    tag: int
    number: int
    """Its number in its stream, from 1 on; 0 for a receive from any source."""
    of_block: tuple[CoalescingBlock, BlockMessage] | None
    """The block that it was posted in, and how it is posted there again."""


@dataclass(slots=True)
class Messages:
    """The point-to-point messages of one process group."""

    sent: dict[tuple[int, int], _MessageStream] = field(default_factory=dict)
    """By (rank in the group, tag)."""
    received: dict[tuple[int, int], _MessageStream] = field(default_factory=dict)
    open: list[_Posted] = field(default_factory=list)
    """In the order in which they were posted."""


class CarriedGroup(ProcessGroup):
    """A process group of the program."""

    def __init__(self, gate: Gate, place: GroupPlace, recipe: Recipe, store: Store) -> None:
        """All members call this; it returns once the real group exists."""
        super().__init__(place.rank, len(place.members))  # type: ignore[call-arg]  # stubs lack this one
        self.place = place
        self._gate, self._recipe = gate, recipe
        self._tally = gate.add_tally(place.key)
        self._lock = threading.Lock()
        self._messages = Messages()
        self._real: ProcessGroup | None = None
        self._backend: Any = None
        self._timeout: timedelta | None = None
        """The timeout that the program has set since the group was made."""
        self._broken = ""
        """Why the group cannot be used any more; empty while it can."""
        self._blocks = threading.local()
        """The coalescing block that a thread is in, under ``now``."""
        self.options = _Options()
        self._put_name_beneath()
        self._ways = self._make_ways()
        entrant = Entrant()
        gate.enter(self._tally, entrant)
        try:
            self.build(store)
        finally:
            gate.leave(self._tally, entrant, was_begun=self._real is not None)

    def _put_name_beneath(self) -> None:
        """Keep the group's name in a backend, as torch needs: one that moves nothing, and raises when it is called."""
        options = FakeProcessGroup.Options()
        options.error_on_collective = True
        fake = FakeProcessGroup._create_internal(self.place.rank, len(self.place.members), options)
        self._register_backend(torch.device(self._recipe.device), ProcessGroup.BackendType.CUSTOM, fake)
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)

    @property
    def _is_queued(self) -> bool:
        """Whether what is called is queued on a device."""
        return self._recipe.device == "cuda"

    # --- what torch asks of a group ---

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the real group has its sequence number."""

    def getBackendName(self) -> str:
        # DDP's logger asks a group named "gloo" for a backend of that kind, which this object has not.
        return "carried"

    def name(self) -> str:
        return self._recipe.backend

    def rank(self) -> int:
        return self.place.rank

    def size(self) -> int:
        return len(self.place.members)

    getRank, getSize = rank, size

    def _get_backend(self, device: torch.device) -> Any:
        # Libraries call collectives of a backend, too, and torch sets timeouts there: the one beneath moves nothing.
        return self

    supports_splitting = supports_time_estimate = supports_shrinking = False
    """What torch asks a backend for."""

    supports_coalescing = False
    """Whether the real group has coalescing blocks."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self.real.set_timeout(timeout)
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        if self._is_queued and self._real is not None:
            self._real.shutdown()  # communicators do not end by being let go of
        self._use(None)
        for each in self._messages.open:
            each.work.let_go(0.0)
        for entrant in list(self._tally.under_way):
            if not is_short(entrant):
                entrant.settle()
        self._broken = "the program has destroyed it"

    @property
    def is_live(self) -> bool:
        """Whether this group is to be grown again after a cut."""
        return not self._broken

    @property
    def real(self) -> ProcessGroup:
        """The real group; `PeerError` where there is none any more."""
        if self._real is None:
            raise PeerError(
                f"communicating in group {self.place.key} of ranks {list(self.place.members)}: "
                f"{self._broken or 'it is not there'}; make another group of the ranks that are left"
            )
        return self._real

    # --- collectives ---

    def _make_ways(self) -> list[Any]:
        """Put the short way of each collective before the method of its name."""
        if SHORT is None or self._is_queued:
            return []
        ways = []
        for name in COLLECTIVES:
            most_bytes = MOST_COPIED_BYTES if name in IN_PLACE else 0
            way = SHORT.Way(self, name, rule_of(name), self.place.rank, most_bytes, ENDED)
            setattr(self, name, way)
            ways.append(way)
        return ways

    def _use(self, real: ProcessGroup | None, backend: Any = None) -> None:
        """Have collectives go to this real group from now on; None while there is none."""
        self._real, self._backend = real, backend
        if backend is not None:
            self.supports_coalescing = bool(getattr(backend, "supports_coalescing", False))
        for way in self._ways:
            way.real = getattr(real, way.__name__, None)

    def _communicate(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Work:
        """Take a collective on the long way: what the program gets a work for, and all if the gate is not open."""
        self._refuse_capture(name)
        if (block := self._block) is not None:
            block.calls.append((name, args, options))
            return ENDED  # torch gives a work for the whole block
        # torch's functions note in the options, their last argument, that they wait themselves.
        has_work = not args or getattr(args[-1], "asyncOp", True)
        kind = QueuedCollective if self._is_queued else Collective
        entered = kind(self._gate, self._tally, (name, args, options), has_work)
        self._gate.enter(self._tally, entered)
        try:
            has_ended = entered.begin(self._real or self.real, rule_of(name), self.place.rank)
        except BaseException:
            if entered.is_inside:
                self._gate.leave(self._tally, entered, was_begun=False)
            raise
        if has_work or self._is_queued:
            self._settle_oldest()
        if has_work:
            return CollectiveWork(entered)
        return ENDED if has_ended else self._outlive(entered)

    def _refuse_capture(self, name: str) -> None:
        """Raise `ConfigError` within a graph of a device: it would hold a communicator that is gone after a cut."""
        if self._is_queued and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"capturing {name} of group {self.place.key} in a CUDA graph: a checkpoint would leave the graph with "
                "a communicator that is gone; communicate outside of graphs"
            )

    def _outlive(self, cut_off: Collective) -> Work:
        """Wait for what was cut off, and has begun anew once the gate is open."""
        self._gate.wait_until_open()
        cut_off.wait()
        return ENDED

    def _settle_oldest(self) -> None:
        """Let go of what has ended and no thread waits for."""
        for each in list(self._tally.under_way):
            if is_short(each) or not each.settle():
                break

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        entrant, was_whole = Entrant(), False
        self._gate.enter(self._tally, entrant)
        try:
            self._backend.monitored_barrier(timeout, wait_all_ranks)
            was_whole = True
        finally:
            # One that names the rank that did not come is none that this rank has to enter, too.
            self._gate.leave(self._tally, entrant, was_begun=was_whole)

    # --- coalescing blocks ---

    @property
    def _block(self) -> CoalescingBlock | None:
        return getattr(self._blocks, "now", None)

    def _start_coalescing(self, device: torch.device) -> None:
        if not self.supports_coalescing:
            self.real._start_coalescing(device)  # raises, in torch's words
        self._blocks.now = CoalescingBlock(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        block = self.drop_block()
        if block is None:
            return self.real._end_coalescing(device)  # likewise
        block.check(self.place.key)
        if block.messages:
            return self._post_block(block)
        return self._communicate(BLOCK, (block,), {}) if block.calls else None  # type: ignore[return-value]  # as torch

    def drop_block(self) -> CoalescingBlock | None:
        """Leave the block that this thread is in; returns it. Nothing of it has begun."""
        block, self._blocks.now = self._block, None
        return block

    def _post_block(self, block: CoalescingBlock) -> Work:
        self._settle_messages()
        self._gate.begin_passing()
        try:
            with self._lock:
                calls = [partial(each.post, self.real) for each in block.messages]
                inner = run_in_block(self.real, block.device, calls)
                works = []
                for each in block.messages:
                    works.append(self._kind_of_message(self._gate, lambda: inner, self._on_ended, is_send=each.is_send))
                    self._add(works[-1], each.peer, each.tag, (block, each))
        finally:
            self._gate.end_passing()
        return MessagesWork(works)

    # --- messages ---

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        if (block := self._block) is not None:
            block.messages.append(BlockMessage(tensors, peer, tag, is_send=True))
            return ENDED
        return self._message(lambda: self.real.send(tensors, peer, tag), peer, tag, is_send=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        if (block := self._block) is not None:
            block.messages.append(BlockMessage(tensors, peer, tag, is_send=False))
            return ENDED
        return self._message(lambda: self.real.recv(tensors, peer, tag), peer, tag, is_send=False)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> MessageWork:
        return self._message(lambda: self.real.recv_anysource(tensors, tag), -1, tag, is_send=False)

    @property
    def _kind_of_message(self) -> type[MessageWork]:
        return QueuedMessage if self._is_queued else MessageWork

    def _message(self, post: Callable[[], Work], peer: int, tag: int, *, is_send: bool) -> MessageWork:
        self._refuse_capture("a message")
        self._settle_messages()
        self._gate.begin_passing()
        try:
            # Posting and numbering are one step: the number is that of the peer's message that it meets. What the real
            # group refuses has none.
            with self._lock:
                work = self._kind_of_message(self._gate, post, self._on_ended, is_send=is_send)
                self._add(work, peer, tag)
        finally:
            self._gate.end_passing()
        return work

    def _add(
        self, work: MessageWork, peer: int, tag: int, of_block: tuple[CoalescingBlock, BlockMessage] | None = None
    ) -> None:
        """Count a message that was posted. The lock is held."""
        number = 0
        if work.is_send:
            stream = self._messages.sent.setdefault((peer, tag), _MessageStream())
            stream.posted += 1
            number = stream.posted
        self._messages.open.append(_Posted(work, peer, tag, number, of_block))

    def _settle_messages(self) -> None:
        """Let go of what a device has ended and the program asks for no more."""
        if self._is_queued:
            for each in list(self._messages.open):
                if not each.work.settle():
                    break

    def _on_ended(self, work: MessageWork) -> None:
        with self._lock:
            found = next(each for each in self._messages.open if each.work is work)
            streams = self._messages.sent if work.is_send else self._messages.received
            peer = found.peer if work.is_send or found.peer >= 0 else work.source
            streams.setdefault((peer, found.tag), _MessageStream()).ended += 1
            if not self._gate.is_closed:
                self._messages.open.remove(found)

    # --- what the control thread sees and does ---

    def wait_for_messages(self) -> None:
        """Have threads wait for messages, which end only when a thread waits."""
        with self._lock:
            open_messages = list(self._messages.open)
        for each in open_messages:
            each.work.wait_aside()

    @property
    def _open(self) -> Sequence[Collective]:
        """The collectives that have not ended, in their order; all calls have returned."""
        under_way = see_under_way(self._gate, self._tally)
        return [each for each in under_way if isinstance(each, Collective) and not each.settle()]

    def count_messages(self, sent: dict[int, int], received: dict[int, int]) -> None:
        """Add the numbers of messages that have ended, by world rank."""
        with self._lock:
            for streams, counts in ((self._messages.sent, sent), (self._messages.received, received)):
                for (peer, _), stream in streams.items():
                    world_rank = self.place.members[peer]
                    counts[world_rank] = counts.get(world_rank, 0) + stream.ended

    @property
    def has_to_end(self) -> bool:
        """Whether a message is under way that has to end before a cut."""
        with self._lock:
            open_messages = list(self._messages.open)
        return any(each.work.has_to_end for each in open_messages)

    def find_abort(self) -> Callable[[], None] | None:
        """What ends the communicators on a device; None where there are none."""
        return self._backend.abort if self._is_queued and self._backend is not None else None

    @property
    def has_open_ends(self) -> bool:
        """Whether messages or collectives wait for other ranks."""
        return bool(self._messages.open or self._open)

    def shed(self, limit_s: float) -> bool:
        """Let go of the real group, cut off already if a thread waits in it; whether all threads let go."""
        self._use(None)
        held = [each for each in self._messages.open if not each.work.let_go(limit_s)]
        return not held and all(work.let_go(limit_s) for work in self._open)

    def forget(self, limit_s: float) -> bool:
        """Let go at a cut of what has not ended, though the program has destroyed this group; whether all threads did.

        A real work holds its group's connections, and cannot end without them: its waiters get an error.
        """
        have_let_go = [work.let_go(limit_s) for work in self._open]
        self.break_off(self._broken)
        return all(have_let_go)

    def build(self, store: Store) -> None:
        """Make the real group over fresh keys of a store. All members call this."""
        real = ProcessGroup(store, self.place.rank, len(self.place.members))
        backend = self._recipe.make(store)
        backend._set_sequence_number_for_group()
        real._set_default_backend(self._recipe.kind)
        real._register_backend(torch.device(self._recipe.device), self._recipe.kind, backend)
        if self._timeout is not None:
            real.set_timeout(self._timeout)
        self._use(real, backend)

    def break_off(self, why: str) -> None:
        """Raise at every use from now on: a member has left the group, so it is not grown again."""
        self._broken = why
        for work in self._open:
            work.break_off(f"waiting in group {self.place.key} of ranks {list(self.place.members)}: {why}")

    def begin_anew(self) -> None:
        """Begin the collectives that were open at the cut again, in their order."""
        for work in self._open:
            work.begin_anew(self.real)

    def received_counts(self) -> list[list[int]]:
        """Return [peer, tag, messages that have ended] of every stream to this rank."""
        return [[peer, tag, stream.ended] for (peer, tag), stream in sorted(self._messages.received.items())]

    def post_again(self, received_by: Callable[[int], Sequence[Sequence[int]]]) -> None:
        """Post the messages that were open at the cut, except those that have arrived.

        ``received_by`` gives the `received_counts` of a member: its counts decide which messages are sent again.
        """
        arrived: dict[int, dict[int, int]] = {}
        still_open = []
        for each in self._messages.open:
            if each.work.is_send and each.peer not in arrived:
                theirs = received_by(each.peer)
                arrived[each.peer] = {tag: count for peer, tag, count in theirs if peer == self.place.rank}
            if each.work.is_send:
                has_ended = each.number <= arrived[each.peer].get(each.tag, 0)
                self._messages.sent[each.peer, each.tag].ended += has_ended - each.work.has_ended
                each.work.has_ended = has_ended
            if not each.work.has_ended:
                still_open.append(each)
        self._messages.open = still_open
        # What is left of a block stands side by side.
        for _, posted in itertools.groupby(
            still_open, lambda each: id(each if each.of_block is None else each.of_block[0])
        ):
            self._post_again(list(posted))

    def _post_again(self, posted: Sequence[_Posted]) -> None:
        """Post a message, or what is left of a block of them."""
        of_blocks = [each.of_block for each in posted if each.of_block is not None]
        inner = None
        if of_blocks:
            calls = [partial(message.post, self.real) for _, message in of_blocks]
            inner = run_in_block(self.real, of_blocks[0][0].device, calls)
        for each in posted:
            each.work.post_again(inner)


class _Options:
    """The options that torch sets on a backend, which the real one is not given."""


def _forwarded(name: str) -> Callable[..., Work]:
    def method(self: CarriedGroup, *args: Any, **options: Any) -> Work:
        return self._communicate(name, args, options)

    method.__name__ = name
    return method


def _refused(name: str) -> Callable[..., Any]:
    def method(self: CarriedGroup, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"calling {name} of group {self.place.key}: Remesh cannot checkpoint it; see docs/torch_programs/limits.md"
        )

    method.__name__ = name
    return method


for _name in COLLECTIVES:
    setattr(CarriedGroup, _name, _forwarded(_name))
for _name in _REFUSED:
    setattr(CarriedGroup, _name, _refused(_name))


class Groups:
    """All groups of this process."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.all: list[CarriedGroup] = []
        """In the order in which they were made; destroyed ones stay, for their counts."""
        self.members: dict[str, tuple[int, ...]] = {}
        """World ranks by key, also of groups that are being made."""
        self._names: dict[str, itertools.count[int]] = {}

    def key_of(self, name: str) -> str:
        """The key of a group that is about to be made: torch uses names again once all groups are destroyed."""
        number = next(self._names.setdefault(name, itertools.count()))
        return f"{name}.{number}" if number else name

    @property
    def live(self) -> list[CarriedGroup]:
        """The groups that the program has not destroyed, in an order that is the same on all members."""
        return sorted((group for group in self.all if group.is_live), key=lambda group: group.place.key)
