"""One rank's part of a job in a generation, or in several of one shape: its step, votes, state and position.

How a step is taken by all or by none: a vote is one all-reduce. A rank that sees its result knows that every rank had
voted. A rank whose all-reduce fails does not know; it goes to the meeting *in doubt*, and if any survivor saw the
result, the rank takes the step too, for its gradients are complete (see :mod:`remesh.elasticity.model.generation`).

Where it stands in its step is the state machine of :mod:`remesh.elasticity.training.step_machine`; what it reads,
:mod:`remesh.elasticity.training.readings`. Plain values are kept as they were at the program's last call, but for those
that a step has changed: what a program does in between (an evaluation, a scheduler's epoch) is done anew where a rank
is lost in it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import nlargest
from operator import itemgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from remesh.checkpoint.storage import Location
from remesh.comm.gather import all_gather_json, step_together
from remesh.elasticity.gradients import ADVICE as GRADIENT_ADVICE, Gradients, find_unlike
from remesh.elasticity.model.alike import describe_unlike
from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.training.fill import FillRules, fill_state
from remesh.elasticity.training.offers import Offers
from remesh.elasticity.training.place import Caller, JobOptions, Leave, RankPlace
from remesh.elasticity.training.position import Position
from remesh.elasticity.training.readings import Identity, OnChange, Readings
from remesh.elasticity.training.safekeeping import Safekeeping
from remesh.elasticity.training.sample_stream import ORDER_ADVICE, Stream
from remesh.elasticity.training.step_machine import Instruction, StepEvent, StepMachine, StepPhase
from remesh.elasticity.training_state import POSITION, CarriedState, HeldState, PlainSettings
from remesh.foundation.checksums import crc32
from remesh.foundation.errors import ConfigError, PeerError
from remesh.foundation.options import check_option
from remesh.groups.blame import is_network_error

_STALE_GROUP = "not initialized in the world group map"
"""torch's error for a group that was dropped."""
_NUM_FLAGS = 5
"""Flags that ranks exchange at a vote, beside the digest of their batch."""
_MAX_GIVERS = 16
"""Ranks that the log names as givers to one rank, those that gave most: in a large job each takes from thousands."""


@dataclass(frozen=True, slots=True)
class _Vote:
    """The flags of all ranks together."""

    flags: list[bool]
    """Of each flag, whether any rank raised it."""
    is_alike: bool
    """Whether all have the same batch, and cut it up alike, or none has one."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that is handed out, or the end of a reading."""

    name: str
    """Of the reading."""
    num_samples: int | None
    """None at the end."""
    stream: Stream | None
    """What it was read from, if ranks must show that they read alike."""
    cut: Mapping[str, str]
    """What decides which samples of it are this rank's, by name; equal on all ranks."""

    @property
    def digest(self) -> int:
        """32 bits, equal where ranks cut up the same batch in the same way."""
        batch = [self.cut, self.num_samples]
        return crc32(json.dumps(batch).encode(), 0 if self.stream is None else self.stream.digest)


class TrainingSession:
    """One rank's part of a job, from entering ``train`` to leaving it."""

    def __init__(
        self, place: RankPlace, held: HeldState | None, *, caller: Caller, options: JobOptions, log: EventLog
    ) -> None:
        plan, rank, lower = place.plan, place.rank, place.lower
        assert lower.mesh is not None
        self.mesh: DeviceMesh = lower.mesh
        self.rank = rank
        self.plan = plan
        """The generation that it is in."""
        self.options = options
        self.readings = Readings(OnChange(options.changed_data))
        self.last_taken = True
        """Whether the last resolved batch was taken."""
        self.is_dispensable = False
        """Whether this rank was asked to leave, and the job loses nothing without what it holds."""
        self._lower = lower
        self._caller = caller
        self._log = log
        self._held = held
        self._is_pretended = place.is_pretended
        self._snapshots = place.snapshots
        self._kept = Safekeeping(replace(place, snapshots=()), options, log)
        self._state: CarriedState | None = None
        self._step = StepMachine()
        self._batch: _Batch | None = None
        """The batch that was handed out last."""
        self._settled: PlainSettings | None = None
        """Plain values as they were at the program's last call; None once it takes a step."""
        self._versions: dict[str, int] = {}
        """How often each tensor had been written to when the mesh was filled."""
        self._filling: CarriedState | None = None
        self._uses_attempts = False
        """Whether the program has its steps in `attempt`."""
        self._voted: set[str] = set()
        """Readings that ranks have voted on in this generation."""

    @property
    def position(self) -> Position:
        """Where the job stands."""
        return self.readings.position

    def carry(self, objects: Mapping[str, Any], window_bytes: int | None = None) -> None:
        """Fill these objects with the job's state, in windows if their size is given."""
        check_option("carrying", "window_bytes", window_bytes, int | None)
        self._step.check(StepEvent.CARRIED)
        if self._is_pretended:
            self._caller.bind()
            self._is_pretended = False
        self.boundary()
        state = CarriedState(objects)
        state.watch(self._step.began, self._step.stepped)
        self._fill(state, window_bytes)

    def _fill(self, state: CarriedState, window_bytes: int | None = None) -> None:
        self._filling = state
        started_s = time.monotonic()
        host_of = {member.rank: self.plan.hosts[member.node] for member in self.plan.members}
        offers = Offers(self._held, self._snapshots)
        options = self.options
        # Where a worker takes a rank in a mesh that goes on, the others keep what they have, and make nothing.
        window = None if self.plan.in_place else window_bytes
        rules = FillRules(
            options.checkpoint,
            options.save_every,
            line=self.plan.number,
            is_behind=self.plan.is_behind,
            known_step=self.plan.known_step,
            window_bytes=window,
        )
        filled = fill_state(state, offers, host_of, rules)
        state.gradients.settle()
        self._held, self._snapshots = None, ()
        self._state = state
        # Where ranks hold the state of a job, all this was looked at when it began.
        self._step.carried(state.optimizers, is_proved=filled.source in ("peers", "snapshots"))
        self.readings.stand_at(filled.position, is_from_disk=filled.source == "checkpoint")
        self._settled, self._versions = state.settings(), state.versions()
        self._log.write(
            "filled",
            generation=self.plan.number,
            rank=self.rank,
            step=self.position.step,
            source=filled.source,
            reason=filled.reason,
            bytes_taken=sum(filled.bytes_taken.values()),
            bytes_by_giver=nlargest(_MAX_GIVERS, filled.bytes_taken.items(), key=itemgetter(1)),
            bytes_kept=filled.bytes_kept,
            bytes_from_disk=filled.bytes_from_disk,
            bound_bytes=filled.bound_bytes,
            move_seconds=filled.move_s,
            windows=filled.num_windows,
            peak_bytes=filled.peak_bytes,
            seconds=time.monotonic() - started_s,
        )

    def keep_state(self) -> None:
        """Between two steps: a checkpoint and a snapshot, where they are due."""
        if self._state is None:
            raise ConfigError("asking for batches: call job.carry(...) first: it restores the position in the data")
        self.boundary()
        # Decided by the step number alone: a spare that has just replaced a member knows nothing else of the past.
        every, step = self.options.save_every, self.position.step
        if every and step and step % every == 0:
            self.save()
        if self._kept.is_snapshot_due(step):
            held = self._hold(self._state)
            assert held is not None, "all is whole between two steps"
            self._kept.take_snapshot(held)

    def begin_reading(self, name: str, dataset: Any, identity: Identity) -> None:
        """The first batch of a reading is asked for."""
        self.check_resolved("asking for batches")
        self.boundary()
        if self._state is not None and self.readings.is_known(name):
            # What the program has done since its last call it did before, when the job stood there.
            self._undo(self._state)
        before = self.position
        self.readings.begin(name, dataset, identity)
        if self.position is not before and self._state is not None:
            self._settled = self._state.settings()

    def goes_on(self, name: str, max_steps: int | None) -> bool:
        """Whether a reading has not come to its end, as far as steps go."""
        reading = self.position.readings.get(name)
        return reading is not None and not reading.is_done and (max_steps is None or reading.steps < max_steps)

    def open_batch(self, name: str, num_samples: int, stream: Stream | None, cut: Mapping[str, Any]) -> None:
        """A batch is handed out.

        ``stream`` is what it was read from, if ranks must show that they read alike; ``cut`` has by name what decides
        which samples of it are whose.
        """
        self._step.handed_out()
        assert self._state is not None
        self._settled = self._state.settings()
        self._batch = _Batch(name, num_samples, stream, {key: str(one) for key, one in cut.items()})

    def leave_batches(self, name: str, epoch: int) -> None:
        """The loop over this reading ends before the reading does: by a ``break``, or by an error."""
        self.readings.leave(name, epoch, None if self._state is None else self._state.settings())

    def end_batches(self, name: str, stream: Stream | None, cut: Mapping[str, Any], epoch: int) -> None:
        """There is no batch of this reading any more; arguments as in `open_batch`, ``epoch`` the passes over it.

        Until ranks have compared their arguments in a vote, and with a stream at any time, one may come to the end
        alone. So the end is compared like a batch, or the others would wait for this rank's vote in vain. A rank that
        has taken another's place may pass over batches that lie behind the others, which know nothing of it.
        """
        if self._state is None:
            return
        self.boundary()
        if not self.plan.in_place and (name not in self._voted or stream is not None):
            batch = _Batch(name, None, stream, {key: str(one) for key, one in cut.items()})
            if not self._exchange([False] * _NUM_FLAGS, batch).is_alike:
                self._refuse_slices(batch)
        self.readings.position = self.position.ended(name, epoch)
        self._settled = self._state.settings()

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the job stands, each once what it reads is behind the job."""
        if self._state is None:
            raise ConfigError("asking for epochs: call job.carry(...) first: it restores the epoch")
        for epoch in self.readings.epochs(count):
            self._settled = self._state.settings()
            try:
                yield epoch
            except GeneratorExit:
                self.readings.leave_epochs(count, self._state.settings())
                raise
            self.check_resolved("asking for the next epoch")
            # Before this rank may leave: what the body did behind its batches is not done again.
            self.readings.end_epoch(epoch, self._state.settings())
            self.boundary()
        self._settled = self._state.settings()

    def _undo(self, state: CarriedState) -> None:
        if self._settled is None:
            return
        written = [name for name, version in state.versions().items() if version != self._versions.get(name, version)]
        if written:
            raise ConfigError(
                f"asking for batches: the program has written to {written[0]!r} on its way to where the job stands, "
                f"at step {self.position.step}; what it does once, or at the end of an epoch, would be done again on "
                "every mesh: let it loop over job.epochs(n), or do it before job.carry"
            )
        settled = self._settled.texts()
        if state.settings().texts() != settled:
            state.set_values(settled)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around one step: if a member is lost inside, go on with another in its place, or let the error go on."""
        self._uses_attempts = True
        try:
            yield
        except RuntimeError as error:
            if not is_network_error(error) and not self._caller.is_broken:
                raise
            if not self.can_stay or not self._rejoin(error):
                raise
        except ValueError as error:
            if self._step.num_steps or _STALE_GROUP not in str(error):
                raise
            raise PeerError(
                "continuing a loop of steps: the program still holds a process group of the previous mesh; every rank "
                "must call train again"
            ) from error

    @property
    def can_stay(self) -> bool:
        """Whether this program can go on where it is when a member is replaced."""
        return (
            self._uses_attempts
            and self._state is not None
            and self._step.is_whole
            # A second loss at the same step may be the program's own groups: then all begin anew.
            and self._step.num_steps > 0
            and self._state.is_plain
            and not self._lower.has_own_groups
        )

    def _rejoin(self, error: BaseException | None) -> bool:
        """Go on in the next generation, with the same mesh in the program's hands; False when it is not to be had."""
        assert self._state is not None
        place = self._caller.rejoin(error)
        if place is None:
            return False
        self.plan, self._kept = place.plan, Safekeeping(replace(place, snapshots=()), self.options, self._log)
        held = self._hold(self._state)
        self.is_dispensable = False
        self._step.rejoined()
        self._voted.clear()
        self._state.gradients.drop()
        state, self._state = self._state, None
        self._held, self._snapshots = held, place.snapshots
        self._fill(state)
        return True

    def vote(self, ok: bool) -> bool:
        """Whether all ranks take the batch that is open."""
        self._step.check(StepEvent.TAKEN)
        batch = self._batch
        assert batch is not None and batch.num_samples is not None
        # A gradient whose collective was given up on the device looks like any other: no rank may take a step with it.
        self._lower.check_end()
        accumulates = self._state is not None and self._state.gradients.is_accumulating
        caller = self._caller
        try:
            flags = [not ok, caller.wants_pause, caller.is_leaving, self._kept.is_sending, accumulates]
            vote = self._exchange(flags, batch)
        except RuntimeError as error:
            if not is_network_error(error):
                raise
            outcome = self._caller.resolve_vote(error)
            if outcome is None:
                if self.can_stay and self._rejoin(None):
                    return False
                raise Leave from None
            taken, owed = outcome, {Instruction.LEAVE}
        else:
            if not vote.is_alike:
                self._refuse_slices(batch)
            rejected, *asked, self._kept.is_any_rank_sending, accumulates = vote.flags
            taken = not rejected
            wants = (Instruction.LEAVE, Instruction.HAND_OVER, Instruction.COMPARE_GRADIENTS)
            owed = {one for one, is_owed in zip(wants, (*asked, accumulates), strict=True) if is_owed}
        self.readings.position = self.position.after(batch.num_samples, batch.name)
        self._voted.add(batch.name)
        self._step.voted(taken, owed)
        self._settled = None
        self._caller.note_step()
        self.last_taken = taken
        return taken

    def _exchange(self, flags: list[bool], batch: _Batch) -> _Vote:
        """Send `_NUM_FLAGS` flags to all ranks, and return those of all. Called by every rank."""
        vote = torch.tensor([*flags, batch.digest, -batch.digest], dtype=torch.int64, device="cpu")
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._lower.control)
        *raised, largest, smallest_negated = vote.tolist()
        return _Vote([bool(one) for one in raised], largest == -smallest_negated)

    def _compare_gradients(self, gradients: Gradients) -> None:
        unlike = find_unlike(all_gather_json(gradients.describe(), self._lower.control))
        if unlike is not None:
            name, one, other = unlike
            raise ConfigError(
                f"keeping gradients over commits at step {self.position.step}: ranks {one} and {other} hold the same "
                f"part of {name!r} with different values, and a rank that dies would lose its part; "
                f"{GRADIENT_ADVICE}"
            )

    def _compare_state(self, state: CarriedState) -> None:
        def look() -> dict[str, Any]:
            state.check_kept()
            return state.describe()

        group = self._lower.control
        state.check_alike(step_together(look, group, "looking at what is carried", tell=lambda one: one).told)

    def _refuse_slices(self, batch: _Batch) -> NoReturn:
        doing = f"committing step {self.position.step + 1}"
        unlike = describe_unlike(all_gather_json(batch.cut, self._lower.control), lambda rank: f"rank {rank}")
        if unlike is not None:
            raise ConfigError(
                f"{doing}: ranks call job.batches with different arguments: {unlike}, and slices of different batches "
                "lose and repeat samples; give all ranks the same"
            )
        assert batch.stream is not None
        read = f"{batch.stream.describe()} (digest {batch.stream.digest:08x})"
        raise ConfigError(
            f"{doing}: ranks did not read the same samples in the same order; rank {self.rank} read {read}, and slices "
            f"of different orders lose and repeat samples; {ORDER_ADVICE}"
        )

    def save(self) -> Location:
        """Save the carried state under the job's checkpoint folder."""
        if self.options.checkpoint is None or self._state is None:
            raise ConfigError(
                "saving: the job needs a folder (remesh.elastic(..., checkpoint=...)) and state (job.carry(...)) first"
            )
        self.boundary()
        if not self._step.is_open and self._settled is None:
            self._settled = self._state.settings()
        return self._kept.save(self._state, self.position, self._values(self._state), self.options.checkpoint)

    def finish(self) -> None:
        """The training function has returned: nothing may be left open."""
        self.boundary()
        self.check_resolved("ending the job")

    def check_resolved(self, doing: str) -> None:
        """The batch that was handed out is taken or dropped: else the position in the data does not advance."""
        if self._step.is_open:
            raise ConfigError(
                f"{doing}: the last batch was neither committed nor dropped; call job.commit() for each batch, or "
                "job.commit(ok=False) to drop it"
            )

    def hold(self, error: BaseException | None = None) -> HeldState | None:
        """The state to keep while the network is gone, which has raised ``error`` in the program.

        What it was given, as long as nothing is carried on the new mesh, and what it has there where others may have
        nothing else any more; None when this rank was hit in the middle of taking a step, so that its state belongs to
        no step at all.
        """
        if self._state is None:
            if self._filling is not None and self._filling.in_doubt is not None:
                return self._filling.in_doubt
            is_torn = self._filling is not None and self._filling.is_torn
            return None if is_torn else self._held
        if error is not None and not self._step.is_open:
            self._settled = self.readings.settle(error) or self._settled
        return self._hold(self._state) if self._step.is_whole else None

    def _hold(self, state: CarriedState) -> HeldState | None:
        if self._step.phase is StepPhase.TAKING:
            try:
                state.gradients.keep()
            except ConfigError:  # some are not added up over ranks
                return None
        where = self.position
        return HeldState(where.step, where.samples, state.pieces(), self._values(state), where.line)

    def _values(self, state: CarriedState) -> dict[str, str]:
        """Plain values that go with the position, and it."""
        settings = state.settings() if self._settled is None else self._settled
        return {**state.plain_moments(), **settings.texts(), POSITION: self.position.to_text()}

    def boundary(self) -> None:
        """The program calls the job: the last step is complete, and this rank may leave between two."""
        was = self._step.phase
        owed = self._step.called()
        if self._step.phase is StepPhase.BETWEEN:
            if was is not StepPhase.BETWEEN:
                self.readings.position = self.position.marked()
            self._settled = self.readings.settle() or self._settled
        for one in owed:
            self._do(one)

    def _do(self, instruction: Instruction) -> None:
        state = self._state
        assert state is not None
        match instruction:
            case Instruction.KEEP_GRADIENTS:
                state.gradients.keep()
            case Instruction.COMPARE_GRADIENTS:
                self._compare_gradients(state.gradients)
            case Instruction.COMPARE_STATE:
                self._compare_state(state)
            case Instruction.HAND_OVER:
                is_leaving = self._caller.is_leaving
                is_safe = self._kept.hand_over(state, self.position, self._values(state), is_leaving)
                self.is_dispensable = is_safe and is_leaving
            case Instruction.LEAVE:
                if not (self.can_stay and self._rejoin(None)):
                    raise Leave
