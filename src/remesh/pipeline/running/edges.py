"""Edges between pipeline stages: reshard plans that run beside the compute.

Definitions. A *route* is all values that go from one stage to another, one plan forward and one for the gradients
back. A *lane* is one direction of a route on one rank that takes part in it. The plans are made once, from where
each stage declares its values on its mesh; then a lane carries one micro-batch after the other, in the order in which
the schedule makes them. Of new shapes the first micro-batch crosses before, in the rank's own thread (`Lane.cross`).

Every lane of a step has threads of its own; over NCCL none has (`remesh.pipeline.running.queued_edges`). Sending hands
them the values and returns; receives are posted a few micro-batches ahead, whether their values are needed yet or not,
so values arrive while the stage computes. Relays and sums of a plan go on in the same threads. Lanes have tags of their
own and never wait for each other.

    stage 0   F0 ─┐ F1 ─┐ F2            B0
    lane          └─0─>└─1─>...   <─0─┘
    stage 1             F0      B0 ─┘ F1

Between stages on the same ranks values change their layout, if at all, and never wait: all these ranks do the same
actions in the same order, and move a value at once when it is made. Such lanes have no threads.

Every receive is posted, sooner or later, whatever its rank does. So a send always comes to its end, and a rank that
blocks until its own sends have ended (`Lane.wait_gone`, as pipelines without overlap do) waits for no other rank's
compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from remesh.comm.gather import Group, group_rank
from remesh.device.streams import CallersStreams
from remesh.foundation.threads import make_thread
from remesh.layout import Box, Layout, Shard
from remesh.layout.from_torch import Piece, dtype_name, torch_dtype
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.values import EdgeEnd
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.planning.transfer import PlanOptions, Transfer, plan_transfer
from remesh.resharding.running.run import BoundTransfer

_FIRST_TAG = 0x5E560000
NUM_AHEAD = 3
"""So many receives of a lane are posted at a time. A sender that learns of a receive only when the one before is done
learns of it late: the word has to pass what the taker itself is sending."""
_ABORT_TIMEOUT_S = 30.0
_SIGNAL = "signal"
_DTYPES_WITHOUT_GRADIENT = ("bool", "int", "uint")


class Payload(Enum):
    """What is sent over the links: the values, or one byte for each."""

    VALUES = "values"
    """What the stages make."""
    SIGNALS = "signals"
    """One byte from each rank that would give, and zeros are computed with: how fast the schedule would be if transfers
    took no time. For measurements; no training."""


@dataclass(frozen=True)
class PlannedWay:
    """One direction between two stages, planned."""

    held: Mapping[str, Layout]
    """How each value lies on the mesh that it leaves, by name; holders are ranks of the group."""
    wanted: Mapping[str, Layout]
    """How it is to lie on the mesh where it goes. Invariant: the same names."""
    transfer: Transfer
    """Carries the values, or signals in their place."""
    signals: tuple[Layout, Layout] | None = None
    """How signals lie on the two meshes; None when values are carried."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """By what each value is multiplied once it has come; 1 where nothing is said."""

    def busiest_bytes(self, name: str) -> int:
        """What one value puts on the busiest NIC; 0 for one that does not go this way. Values of a way share its plan
        in proportion to their bytes."""
        total = sum(layout.nbytes for layout in self.held.values())
        if name not in self.held or not total:
            return 0
        return round(self.transfer.busiest_nic_bytes * self.held[name].nbytes / total)


@dataclass(frozen=True)
class StageRoute:
    """All values from one stage to another."""

    source: int
    target: int
    forward: PlannedWay
    backward: PlannedWay | None
    """Of the gradients; None when no value has one."""


def has_gradient(dtype: str) -> bool:
    """Whether values of this dtype have gradients.

    >>> has_gradient("bfloat16"), has_gradient("int64")
    (True, False)
    """
    return not dtype.startswith(_DTYPES_WITHOUT_GRADIENT)


def plan_route(
    ends: tuple[int, int],
    made: Mapping[str, EdgeEnd],
    taken: Mapping[str, EdgeEnd],
    host_of: Mapping[int, str],
    payload: Payload,
    options: PlanOptions,
) -> StageRoute:
    """The route between two stages, planned both ways; the same on every rank for the same arguments.

    ``ends`` are source and target; ``made`` and ``taken`` are each value there. `PipelineError` when the two stages
    share some of their ranks.
    """
    held, wanted = ({name: end.value for name, end in each.items()} for each in (made, taken))
    shared = _ranks_of(held) & _ranks_of(wanted)
    if shared and _ranks_of(held) != _ranks_of(wanted):
        raise PipelineError(
            f"planning the values from stage {ends[0]} to {ends[1]}: rank {min(shared)} works for both, expected the "
            "same ranks for both or none; make the two one stage, or give both one mesh"
        )
    plan = _plan_signals if payload is Payload.SIGNALS else _plan_values
    forward = plan(held, wanted, host_of, options)
    with_gradient = [name for name in made if has_gradient(held[name].dtype)]
    if not with_gradient:
        return StageRoute(*ends, forward, None)
    back = [{name: each[name].gradient for name in with_gradient} for each in (taken, made)]
    scales = {name: made[name].scale * taken[name].scale for name in with_gradient}
    scales = {name: scale for name, scale in scales.items() if scale != 1}
    return StageRoute(*ends, forward, replace(plan(back[0], back[1], host_of, options), scales=scales))


def _plan_values(
    held: Mapping[str, Layout], wanted: Mapping[str, Layout], host_of: Mapping[int, str], options: PlanOptions
) -> PlannedWay:
    moves = [TensorMove(name, held[name], wanted[name]) for name in held]
    return PlannedWay(held, wanted, plan_transfer(moves, host_of, options))


def _plan_signals(
    held: Mapping[str, Layout], wanted: Mapping[str, Layout], host_of: Mapping[int, str], options: PlanOptions
) -> PlannedWay:
    """One byte from every rank that gives to every rank that takes."""
    givers, takers = sorted(_ranks_of(held)), sorted(_ranks_of(wanted))
    shape = (len(givers),)
    one_each = tuple(Shard(rank, Box((number,), (number + 1,))) for number, rank in enumerate(givers))
    signals = (
        Layout(shape, one_each, "uint8"),
        Layout(shape, tuple(Shard(rank, Box.of_shape(shape)) for rank in takers), "uint8"),
    )
    return PlannedWay(held, wanted, plan_transfer([TensorMove(_SIGNAL, *signals)], host_of, options), signals)


def _ranks_of(layouts: Mapping[str, Layout]) -> set[int]:
    return {int(rank) for layout in layouts.values() for rank in layout.holders}


@dataclass(frozen=True, slots=True)
class Passage:
    """One micro-batch on its way, as one rank saw it."""

    microbatch: int
    start_s: float
    """When this rank began to give it, or had it posted as wanted; monotonic clock."""
    end_s: float
    """When it had left, or arrived."""


class LaneEnd:
    """A rank's end of a lane: the values that it gives or takes there, bound to the plan that moves them."""

    def __init__(self, way: PlannedWay, group: Group, device: torch.device) -> None:
        """``device`` is where values that arrive are kept."""
        self._way = way
        self._group = group
        self._rank = group_rank(group)
        self._device = device
        self.gives = self._rank in _ranks_of(way.held)
        self.takes = self._rank in _ranks_of(way.wanted)

    def select(self, microbatch: int, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the values that leave here; `PipelineError` for others than those of the micro-batches before."""
        for name, layout in self._way.held.items():
            value = values[name]
            expected = (local_shape(layout, self._rank), layout.dtype)
            found = (tuple(value.shape), dtype_name(value.dtype))
            if found != expected:
                raise PipelineError(
                    f"sending {name!r} of micro-batch {microbatch}: it is {found[1]} of shape {found[0]}, the micro-"
                    f"batches before were {expected[1]} of {expected[0]}; all micro-batches of a step have one shape: "
                    "pad them"
                )
        return {name: values[name] for name in self._way.held}

    def bind(self, leaving: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], BoundTransfer]:
        """New memory for the values that come, if any, and what gives those that leave and fills it."""
        taken, pieces = self._taken() if self.takes else ({}, {})
        given = self._given(leaving) if self.gives else {}
        return taken, BoundTransfer(self._way.transfer, given, pieces, self._group)

    def _given(self, values: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
        if self._way.signals is None:
            return {name: self._piece(values[name], layout) for name, layout in self._way.held.items()}
        signal = torch.zeros(1, dtype=torch.uint8, device=self._device)
        return {_SIGNAL: self._piece(signal, self._way.signals[0])}

    def _taken(self) -> tuple[dict[str, torch.Tensor], dict[str, Piece]]:
        values = {name: self._empty(layout) for name, layout in self._way.wanted.items()}
        if self._way.signals is None:
            return values, {name: self._piece(values[name], layout) for name, layout in self._way.wanted.items()}
        for value in values.values():
            value.zero_()
        layout = self._way.signals[1]
        signal = torch.zeros(layout.global_shape, dtype=torch.uint8, device=self._device)
        return values, {_SIGNAL: self._piece(signal, layout)}

    def _empty(self, layout: Layout) -> torch.Tensor:
        shape = local_shape(layout, self._rank)
        return torch.empty(shape, dtype=torch_dtype(layout.dtype), device=self._device)

    def _piece(self, value: torch.Tensor, layout: Layout) -> Piece:
        mine = layout.shards_of(self._rank)
        shards = tuple(replace(shard, holder=0) for shard in mine)
        return Piece(value.contiguous(), layout.global_shape, shards, layout.partial)

    def scaled(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What has come, as it is wanted."""
        for name, scale in self._way.scales.items():
            values[name] = values[name] * scale
        return values


class Lane:
    """One direction of a route on one rank that takes part in it, for one step.

    ``start`` begins; the giver then calls `give`, the taker `take`, once for each micro-batch, and both `finish`.
    """

    def __init__(self, number: int, end: LaneEnd, order: Sequence[int], on_error: Callable[[], None]) -> None:
        """``number`` is the lane's among all of the pipeline, the same on all its ranks; ``order`` the micro-batches as
        they are made; ``on_error`` is called in the lane's thread when it ends before its time."""
        self._end = end
        self._is_local = end.gives and end.takes
        self._tag = _FIRST_TAG + NUM_AHEAD * number
        self._order = tuple(order)
        self._on_error = on_error
        self._changed = threading.Condition()
        self._waiting: dict[int, dict[str, torch.Tensor]] = {}
        """Given and not yet gone, by micro-batch."""
        self._arrived: dict[int, dict[str, torch.Tensor]] = {}
        """Come and not yet taken, by micro-batch."""
        self._gone: set[int] = set()
        self._error: BaseException | None = None
        self._is_aborted = False
        self._streams = CallersStreams()
        self._passages: list[Passage] = []
        """In the order in which they ended."""
        self._name = f"lane-{number}"
        self._threads: list[threading.Thread] = []

    def cross(self, microbatch: int) -> None:
        """Carry a micro-batch in the caller's thread, before the start; both ends call this for the same one."""
        if microbatch not in self._gone:
            self._carry(microbatch, self._tag)
            self._gone.add(microbatch)

    def start(self) -> None:
        """Begin to carry what has not crossed."""
        self._order = tuple(microbatch for microbatch in self._order if microbatch not in self._gone)
        num = len(self._order)
        # Every thread has its own share of the micro-batches, and a tag: their messages never mix.
        shares = [range(num)] if self._end.gives else [range(at, num, NUM_AHEAD) for at in range(NUM_AHEAD)]
        shares = [] if self._is_local else shares
        self._threads = [make_thread(self._name, self._work, share, daemon=True) for share in shares if share]
        for thread in self._threads:
            thread.start()

    def give(self, microbatch: int, values: Mapping[str, torch.Tensor]) -> None:
        """Hand over what is to be carried; returns at once, but between stages of one rank when it is carried. The
        tensors belong to the lane until they are gone."""
        leaving = self._end.select(microbatch, values)
        with self._changed:
            self._waiting[microbatch] = leaving
            self._changed.notify_all()
        if self._is_local:
            self.cross(microbatch)

    def take(self, microbatch: int) -> dict[str, torch.Tensor]:
        """The values of a micro-batch, once; blocks until they are there. Raises what ended the lane."""
        self._wait_until(lambda: microbatch in self._arrived)
        return self._end.scaled(self._arrived.pop(microbatch))

    def wait_gone(self, microbatch: int) -> None:
        """Block until a micro-batch has left. Raises what ended the lane."""
        self._wait_until(lambda: microbatch in self._gone)

    def finish(self) -> None:
        """Block until everything was carried. Raises what ended the lane."""
        self._wait_until(lambda: self._gone.issuperset(self._order))
        for thread in self._threads:
            thread.join()

    def abort(self) -> None:
        """Carry no more. To be called once the group's connections are closed: that ends what is under way."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_ABORT_TIMEOUT_S)

    @property
    def error(self) -> BaseException | None:
        """What ended the lane before its time."""
        return self._error

    def passages(self, started_s: float) -> tuple[Passage, ...]:
        """How the micro-batches went; the lane's clock is the host's, whenever the step has ``started_s``."""
        return tuple(self._passages)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        # The threads of the lane wait at most for the group's timeout, and then there is an error.
        with self._changed:
            self._changed.wait_for(lambda: is_so() or self._error is not None)
            if self._error is not None and not is_so():
                raise self._error

    def _work(self, share: range) -> None:
        """Carry the micro-batches at these places of the order."""
        try:
            with self._streams.followed():
                for place in share:
                    self._carry(self._order[place], self._tag + place % NUM_AHEAD)
                    if self._is_aborted:
                        return
                    with self._changed:
                        self._gone.add(self._order[place])
                        self._changed.notify_all()
        except BaseException as error:  # raised by the wait for the lane
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._on_error()

    def _carry(self, microbatch: int, tag: int) -> None:
        leaving: dict[str, torch.Tensor] = {}
        if self._end.gives:
            with self._changed:
                self._changed.wait_for(lambda: microbatch in self._waiting or self._is_aborted)
                if self._is_aborted:
                    return
                leaving = self._waiting.pop(microbatch)
        taken, job = self._end.bind(leaving)
        start_s = time.monotonic()
        job.run_unconfirmed(tag)
        with self._changed:
            self._arrived[microbatch] = taken
            self._passages.append(Passage(microbatch, start_s, time.monotonic()))


def local_shape(layout: Layout, rank: int) -> tuple[int, ...]:
    """Shape of a rank's part of a value; values lie in one box on each rank."""
    (shard,) = layout.shards_of(rank)
    return shard.box.shape
