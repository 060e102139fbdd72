"""The lower half of one rank: serves calls on a real MPI, and can be made quiet, saved and grown again.

One thread owns a :class:`MpiLowerHalf` and calls its methods; only its ``wake`` may be called from another.
Nothing here blocks on another rank: whatever waits is a pending entry that :meth:`serve_once` comes back to.

A checkpoint, seen from here::

    close() ... drain_progress()   until quiet() on every rank, sent == received between every two, and the collectives
                                   complete that all members have entered
    state_bytes()                  beside the image of the upper half
    open()                         to go on; or release() and exit

Restart: ``from_state(data, mpi, channel)``, ``rebuild()``, upper half restored, ``attach(pid)``, ``serve_once()`` ...
A request that the upper half had posted and that had no answer yet is found in the channel and served; a collective
that was open is begun anew, or goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from remesh.carried.mpi.arena import Arena
from remesh.carried.mpi.calls.wire_messages import What
from remesh.carried.mpi.calls.words import NUM_SLOTS
from remesh.carried.mpi.channel import SharedChannel
from remesh.carried.mpi.lower import state
from remesh.carried.mpi.lower.collectives import Collectives, GroupKey
from remesh.carried.mpi.lower.engine import Callbacks, make_engine
from remesh.carried.mpi.lower.open_collectives import OpenCall, OpenCollective, begin_from, keep, of_engine
from remesh.carried.mpi.lower.pace import WaitingPace
from remesh.carried.mpi.lower.records import Arrived
from remesh.carried.mpi.lower.requests import Requests
from remesh.carried.mpi.lower.serving import BLOCKED, Serving
from remesh.carried.mpi.lower.transfers import MessageTransfers
from remesh.carried.mpi.lower.upper_memory import UpperMemory
from remesh.carried.mpi.lower.windows import Windows
from remesh.carried.mpi.lower.wire import Wire
from remesh.carried.rounds.status import Activity, CollectiveProgress
from remesh.foundation.linux.procfs import inner_id

_MAX_WATCHED: Final = 64
"""Limit of collectives whose end is noticed at once; those beyond are looked after when something else happens."""
_LAST_PIECES_S: Final = 2.0
"""Time limit for pieces between ranks that both leave; a rank that waits longer for one has lost its peer."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters that are compared over the ranks."""

    sent: tuple[int, ...]
    """Wire messages handed to MPI for each world rank. Final once every rank is closed and quiet."""
    received: tuple[int, ...]
    """Wire messages taken from each world rank. Invariant over a cut: a.received[b] <= b.sent[a]."""
    collectives: Mapping[str, CollectiveProgress]
    """Collectives by the number and first rank of each communicator that has had a real one: all members know of it."""


class MpiLowerHalf:
    """Serves one upper half over ``channel`` with the MPI module ``mpi`` (a real, initialised ``mpi4py.MPI``)."""

    def __init__(self, mpi: Any, channel: SharedChannel, arena: Arena | None = None, *, spinning: bool = False) -> None:
        """Duplicate the world communicator (all ranks call this)."""
        self._channel = channel
        self._comms = [mpi.COMM_WORLD.Dup() for _ in range(3)]
        control, wire, world = self._comms
        self._requests = Requests()
        self._memory = UpperMemory()
        self._memory.arena = arena
        self._wire = Wire(mpi, wire)
        self._transfers = MessageTransfers(self._requests)
        self._collectives = Collectives(mpi, control, world, self._requests, self._wire, self._memory)
        self._windows = Windows(self._wire, self._memory, self._requests)
        self._serving = Serving(self._transfers, self._collectives, self._windows, self._memory, self._requests)
        self._serving.description = _describe(mpi)
        self._reopened: list[OpenCollective] = []
        """Open collectives of an earlier stay, until there is a program whose operands can be read."""
        self._aborting: set[int] = set()
        self._attached: dict[int, tuple[int, int]] = {}
        self._closed = False
        self._woken = False
        self._progressed = False
        """Whether the engine has done something since the last look."""
        self._pace = WaitingPace.of(mpi, spinning=spinning)
        self._engine = self._make_engine(mpi)
        self._wire.engine = self._transfers.engine = self._engine

    def _make_engine(self, mpi: Any) -> Any:
        bodies, serving = self._channel.bodies, self._serving
        callbacks = Callbacks(
            on_message=self._on_message,
            serve=self._serve,
            serve_posted=serving.start_access,
            tell=lambda slot, request: serving.tell(bodies[slot], request),
            tell_wait=lambda slot: serving.tell_wait(bodies[slot]),
        )
        return make_engine(
            mpi,
            self._channel.base,
            self._wire,
            self._requests,
            self._transfers,
            self._collectives,
            self._windows,
            self._pace,
            callbacks,
            has_arena=self._memory.arena is not None,
        )

    def _on_message(self, source: int, fields: tuple[Any, ...], payload: bytes) -> None:
        """Handle a message of another rank that the engine leaves to Python."""
        comm, _, what, first, num_members, *_ = fields
        if what == What.ACCESSED:
            self._windows.hear_accessed(source, fields, payload)
        else:
            self._collectives.on_making(source, what, comm, GroupKey(first, num_members))

    @classmethod
    def from_state(
        cls, data: bytes, mpi: Any, channel: SharedChannel, arena: Arena | None = None, *, spinning: bool = False
    ) -> Self:
        """Make the half that :meth:`state_bytes` described, on another MPI. The image brings the channel's bytes back.

        Raises:
            FormatError: the bytes are damaged, or belong to another rank or number of ranks.
        """
        parts = state.load(data, rank=mpi.COMM_WORLD.Get_rank(), size=mpi.COMM_WORLD.Get_size())
        half = cls(mpi, channel, arena, spinning=spinning)
        half._requests.by_number.update({request.number: request for request in parts.requests})
        half._requests.next_number = parts.next_numbers["request"]
        half._transfers.next_message = parts.next_numbers["message"]
        half._serving.next_parcel = parts.next_numbers["parcel"]
        half._transfers.matching.fill(parts.posted, parts.arrived)
        half._transfers.messages.update(parts.messages)
        half._transfers.owed.extend(
            (receive, Arrived(receive.comm, receive.source, receive.message_tag, receive.message_bytes, None, send))
            for receive, send in ((half._requests.by_number[number], send) for number, send in parts.owed)
        )
        half._serving.parcels.update(parts.parcels)
        half._serving.finished = parts.finished
        for number, members in parts.members.items():
            half._collectives.add(number, members)
        half._collectives.entered.update(parts.entered)
        half._collectives.made.update(parts.made)
        half._resume_small(parts)
        half._reopened = parts.open
        half._windows.windows.update(parts.windows)
        half._attached = parts.attached
        half.close()
        return half

    def _resume_small(self, parts: state.HalfState) -> None:
        """Go on with collectives that are messages of ours."""
        for part in parts.parts:
            self._engine.keep_part(part.comm, part.clock, part.source, part.error, part.operand)
        for one in parts.small:
            request = self._requests.by_number[one.request]
            plan = self._collectives.plan_of(request.comm, one.kind, one.root)
            asked = (one.clock, one.kind, one.root, one.op, one.type, one.block_bytes)
            self._engine.resume_small(request, *asked, plan, one.step, one.operand)

    def attach(self, upper_pid: int) -> None:
        """Tell the process id (as this process sees it) whose memory big payloads are read from and written to.

        After :meth:`from_state` this is also what lets the restored upper half be served.

        Raises:
            FormatError: the upper half has come with a channel of another version of Remesh.
        """
        self._channel.check("serving a program that has come with its channel")
        # The words of the restored channel are those of the host that it left.
        self._channel.set_pace(self._pace.upper_spin, self._pace.give_way_us)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have ended at once
            self._channel.set_program(inner_id(upper_pid, upper_pid))
        self._memory.attach(upper_pid)
        self._engine.attach(upper_pid)
        for slot, (number, operation) in self._attached.items():
            if self._channel.pending() >> slot & 1 and self._channel.request_number(slot) == number:
                self._engine.wait_for(slot, operation)
        self._attached = {}
        self._reopen()
        self.open()

    def _reopen(self) -> None:
        again = []
        for kept in self._reopened:
            request = self._requests.by_number[kept.request]
            send: bytes | bytearray | memoryview = kept.send or b""
            if kept.send_address:
                result = range(request.address, request.address + kept.shape.receive_bytes)
                send, _ = self._memory.operand(kept.send_address, kept.shape.send_bytes, result)
            again.append(begin_from(kept, request, send))
        self._collectives.reopen(again)
        self._reopened = []

    def serve_once(self, timeout_s: float) -> None:
        """Serve the upper half and move MPI on, for about ``timeout_s``; less if :meth:`wake` is called."""
        deadline = time.monotonic() + timeout_s
        fruitful = 0
        while not self._woken:
            if self._step():
                fruitful += 1
                # A program that polls always has a next request: the time must end this, too.
                if fruitful & 63 == 0 and time.monotonic() >= deadline:
                    break
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            # Held until the run is over: a call that it leaves to Python may end one of them, and drop it.
            watched = self._collectives.watched()[:_MAX_WATCHED]
            places = [self._wire.address_of(each) for each in watched]
            self._progressed = self._engine.run(int(left_s * 1e6) + 1, places)
        self._woken = False
        self._engine.was_woken()

    def _step(self) -> bool:
        """Do all that can be done now; returns whether there was anything."""
        progress = self._progressed
        self._progressed = False
        progress |= bool(self._engine.step(self._requests.news))
        progress |= self._collectives.poll()
        if self._closed:
            return progress
        if self._requests.news:  # the engine also looks at what Python has completed
            self._progressed = bool(self._engine.step(True))
        self._requests.news = False
        return progress or self._progressed

    def _serve(self, slot: int) -> int:
        """Serve the request in a slot; if it blocks, note the reason."""
        found = self._serving.serve(slot, self._channel.bodies[slot])
        if found == BLOCKED:
            self._aborting.add(slot)
        return found

    def _tell_engine(self) -> None:
        """Tell the engine which work it must leave alone."""
        blocked = sum(1 << slot for slot in self._aborting)
        self._engine.set(self._closed, blocked)

    def wake(self) -> None:
        """Make a waiting :meth:`serve_once` return soon. From any thread."""
        self._woken = True
        self._engine.wake()

    def counters(self) -> Counters:
        """A snapshot of the counters."""
        entered = self._collectives.entered
        ended: dict[int, int] = {}
        for begun in self._open():
            comm = begun.request.comm
            ended[comm] = min(begun.number - 1, ended.get(comm, begun.number))
        # Disjoint groups may have one number.
        collectives = {
            f"{number} of rank {members[0]}": CollectiveProgress(
                entered.get(number, 0), ended.get(number, entered.get(number, 0))
            )
            for number, members in self._collectives.members.items()
            if number in self._collectives.made
        }
        return Counters(tuple(self._engine.sent), tuple(self._engine.received), collectives)

    def _open(self) -> list[OpenCall]:
        """The collectives of the real MPI that have been entered and are not complete."""
        return [*self._collectives.open, *(of_engine(*running) for running in self._engine.running)]

    def caught(self) -> dict[str, int]:
        """The operations that a checkpoint taken now would interrupt, counted by kind; kinds without any are absent."""
        transfers = self._transfers
        counts = {
            "messages nobody had received": len(transfers.matching.arrived) + len(transfers.messages),
            "receives without a message": len(transfers.matching.posted),
            "transfers not begun": len(transfers.owed),
            "requests open": len(self._requests.by_number),
            "collectives open": len(self._open()) + len(self._engine.small),
            "locks waited for": sum(len(window.locks.waiting) for window in self._windows.windows.values()),
        }
        return {kind: count for kind, count in counts.items() if count}

    def position(self) -> Activity:
        """The current activity of the upper half."""
        if self._channel.pending():
            return Activity.INSIDE if self._open() or self._engine.small else Activity.WAITING
        return Activity.FINISHED if self._serving.finished else Activity.COMPUTING

    @property
    def has_been_called(self) -> bool:
        """Whether the program has ever made a call, in its life before a restart too."""
        return any(self._channel.request_number(slot) for slot in range(NUM_SLOTS))

    @property
    def finished(self) -> bool:
        """Whether the program has called Finalize."""
        return self._serving.finished

    @property
    def abort_code(self) -> int | None:
        """The exit status of ``Comm.Abort`` if the program called it: end the job with it."""
        return self._serving.abort_code

    def close(self) -> None:
        """Take no more requests of any kind and start no more transfers; those that are running finish.

        Nothing is answered and nothing written to the upper half's memory once :meth:`quiet` is true.
        """
        self._closed = True
        self._channel.close_gate()
        self._tell_engine()
        self._transfers.decline_ahead()

    def open(self) -> None:
        """Take requests again, after :meth:`close`: the checkpoint is done or given up."""
        self._closed = False
        self._channel.open_gate()
        self._requests.news = True
        self._tell_engine()
        self._transfers.ask_for_owed()

    def drain_progress(self) -> None:
        """Take what has arrived from MPI, without waiting. Between :meth:`close` and :meth:`open`."""
        while self._step():
            pass

    def quiet(self) -> bool:
        """Whether nothing of this half is on its way: every send handed over, no transfer open.

        After :meth:`close`, accesses of other ranks to a window of this one are still carried out and answered, small
        collectives go on, and what others sent ahead is given back; apart from those, once true it stays true, and
        ``counters().sent`` no longer changes. Messages may arrive.
        """
        under_way = self._engine.carrying or self._windows.is_busy or self.in_file
        return self._engine.handed_over and not under_way

    @property
    def in_file(self) -> bool:
        """Whether the program is in the middle of an access to a file that ranks share."""
        return bool(self._channel.num_in_files)

    def forget_program(self) -> None:
        """Reset the state of the program's calls after its end, wherever it was."""
        self._channel.forget_program()

    def state_bytes(self) -> bytes:
        """The bytes of all that must outlive this lower half: communicators, requests, queues. Changes nothing.

        Only when closed, quiet, and all messages that were sent have been received. Struct and JSON, no pickle.
        """
        attached = {
            slot: (self._channel.request_number(slot), operation) for slot, operation in self._engine.singles.items()
        }
        transfers = self._transfers
        parts = state.HalfState(
            rank=self._wire.rank,
            size=self._wire.size,
            next_numbers={
                "request": self._requests.next_number,
                "message": transfers.next_message,
                "parcel": self._serving.next_parcel,
            },
            requests=list(self._requests.by_number.values()),
            posted=transfers.matching.posted,
            arrived=transfers.matching.arrived,
            messages=transfers.messages,
            owed=[(receive.number, message.sender_request) for receive, message in transfers.owed],
            parcels=self._serving.parcels,
            members=self._collectives.members,
            entered=self._collectives.entered,
            made=sorted(self._collectives.made),
            open=[keep(begun) for begun in self._open()],
            small=[state.SmallCollective(*one) for one in self._engine.small],
            parts=[state.KeptPart(*one) for one in self._engine.parts],
            windows=self._windows.windows,
            attached=attached,
            finished=self._serving.finished,
        )
        return state.save(parts)

    def rebuild(self) -> None:
        """Make the communicators that had been used; the others are made at their first collective. All ranks call."""
        self._collectives.replay()

    def release(self) -> None:
        """Release everything of MPI's, so that it can be finalised. All ranks call this."""
        self._take_last_pieces()
        self._end_collectives()
        self._collectives.release()
        self._wire.release()
        self._engine.release()
        for comm in self._comms:
            comm.Free()

    def _take_last_pieces(self) -> None:
        """Receive the messages that the program left unreceived: MPI keeps a communicator that has messages."""
        self._transfers.discard_ahead()
        self._engine.give_up_ahead()
        self._closed = True
        self._tell_engine()
        end_s = time.monotonic() + _LAST_PIECES_S
        while self._engine.carrying and time.monotonic() < end_s:
            self._step()

    def _end_collectives(self) -> None:
        """End what is open on any rank, with data that nobody reads: MPI cannot be finalised before."""
        self._collectives.stand_in(of_engine(*running) for running in self._engine.running)
        while self._collectives.is_running or self._engine.running:
            self._step()


def _describe(mpi: Any) -> dict[str, Any]:
    """Describe the MPI library to the program; this changes at a restart."""
    return {
        "library_version": mpi.Get_library_version().strip("\0\n "),
        "version": list(mpi.Get_version()),
        "processor_name": mpi.Get_processor_name(),
        "vendor": [mpi.get_vendor()[0], list(mpi.get_vendor()[1])],
    }
