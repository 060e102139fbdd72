"""What stands behind a job: one rank's stint in a generation, or in several of one shape.

How a step is taken by all or by none: a vote is one all-reduce. A rank that sees its result knows that every rank had
voted. A rank whose all-reduce fails does not know; it goes to the meeting *in doubt*, and if any survivor saw the
result, the rank takes the step too, for its gradients are complete (see :mod:`remesh.elasticity.model.generation`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from remesh.checkpoint.storage import Location
from remesh.comm.gather import all_gather_json
from remesh.elasticity.gradients import ADVICE as GRADIENT_ADVICE, Gradients, find_unlike
from remesh.elasticity.model.alike import describe_unlike
from remesh.elasticity.state import CarriedState, HeldState
from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.training.fill import FillRules, fill_state
from remesh.elasticity.training.offers import Offers
from remesh.elasticity.training.place import Caller, JobOptions, Leave, RankPlace
from remesh.elasticity.training.position import Position
from remesh.elasticity.training.safekeeping import Safekeeping
from remesh.elasticity.training.stream import ORDER_ADVICE, Stream
from remesh.foundation.checksums import crc32
from remesh.foundation.errors import ConfigError, PeerError
from remesh.foundation.options import check_option
from remesh.groups.blame import is_network_error

_STALE_GROUP = "not initialized in the world group map"
"""What torch says of a group that was dropped."""
_NUM_SAID = 5
"""Things that ranks say to each other at a vote, beside the digest of their batch."""
_MAX_GIVERS = 16
"""Ranks that the log names as givers to one rank, those that gave most: in a large job each takes from thousands."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """What all ranks said together."""

    said: list[bool]
    """Of each thing, whether any rank said so."""
    is_alike: bool
    """Whether all have the same batch, and cut it up alike, or none has one."""


class Stint:
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
        self.position = Position()
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
        self._kept = Safekeeping(place, options, log)
        self._state: CarriedState | None = None
        self._unresolved: int | None = None
        """Samples of the batch that was handed out and is not committed yet; None when there is none."""
        self._reading: Stream | None = None
        """What the batch was read from, if ranks must show that they read alike."""
        self._cut: dict[str, str] = {}
        """What decides which samples of it are this rank's, by name; equal on all ranks."""
        self._in_step = False
        self._must_leave = False
        self._must_hand_over = False
        self._filling: CarriedState | None = None
        self._uses_attempts = False
        """Whether the program has its steps in `attempt`."""
        self._has_compared_gradients = self._must_compare_gradients = False
        """Whether ranks saw in this generation that they hold like gradients, and whether the last vote asks for it."""
        self._num_steps_here = 0
        """Batches resolved since this rank entered its generation."""

    def carry(self, objects: Mapping[str, Any], window_bytes: int | None = None) -> None:
        """Fill these objects with the job's state, in windows if their size is given."""
        check_option("carrying", "window_bytes", window_bytes, int | None)
        if self._state is not None:
            raise ConfigError("carrying: this generation already carries state; name all objects in one call")
        if self._is_pretended:
            self._caller.bind()
            self._is_pretended = False
        self.boundary()
        self._fill(CarriedState(objects), window_bytes)

    def _fill(self, state: CarriedState, window_bytes: int | None = None) -> None:
        self._filling = state
        started_s = time.monotonic()
        host_of = {member.rank: self.plan.hosts[member.node] for member in self.plan.members}
        offers = Offers(self._held, self._snapshots)
        options = self.options
        # Where a rank takes a seat in a mesh that stays, the others keep what they have, and make nothing.
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
        self.position = filled.position
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
            self._kept.take_snapshot(self._hold(self._state))

    def open_batch(self, num_samples: int, reading: Stream | None, cut: Mapping[str, Any]) -> None:
        """A batch is handed out.

        ``reading`` is what it was read from, if ranks must show that they read alike; ``cut`` has by name what decides
        which samples of it are whose.
        """
        self._unresolved, self._reading = num_samples, reading
        self._cut = {name: str(one) for name, one in cut.items()}

    def end_batches(self, reading: Stream | None, cut: Mapping[str, Any]) -> None:
        """There is no batch any more; ``reading`` is what has ended, if that is a stream, ``cut`` as in `open_batch`.

        Until ranks have compared their arguments in a vote, and with a stream at any time, one may come to the end
        alone. So the end is compared like a batch, or the others would wait for this rank's vote in vain. A rank that
        has taken another's place may pass over batches that lie behind the others, who know nothing of it.
        """
        have_compared = self._num_steps_here > 0 and reading is None
        if self._state is None or self._must_leave or self.plan.in_place or have_compared:
            return
        self._reading, self._cut = reading, {name: str(one) for name, one in cut.items()}
        if not self._exchange([False] * _NUM_SAID).is_alike:
            self._refuse_slices()

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
            if self._num_steps_here or _STALE_GROUP not in str(error):
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
            and not self._in_step
            # A second loss at the same step may be the program's own groups: then all begin anew.
            and self._num_steps_here > 0
            and self._state.is_plain
            and not self._lower.has_own_groups
        )

    def _rejoin(self, error: BaseException | None) -> bool:
        """Go on in the next generation, with the same mesh in the program's hands; False when it is not to be had."""
        assert self._state is not None
        place = self._caller.rejoin(error)
        if place is None:
            return False
        self.plan, self._kept = place.plan, Safekeeping(place, self.options, self._log)
        self._must_leave = self._must_hand_over = self.is_dispensable = False
        self._unresolved, self._num_steps_here = None, 0
        self._has_compared_gradients = self._must_compare_gradients = False
        self._state.gradients.drop()
        state, self._state = self._state, None
        self._held, self._snapshots = self._hold(state), place.snapshots
        self._fill(state)
        return True

    def vote(self, ok: bool) -> bool:
        """Whether all ranks take the batch that is open."""
        if self._unresolved is None:
            raise ConfigError(
                "committing: no batch has been taken; call commit once for each batch of job.batches(...)"
            )
        # A gradient whose collective was given up on the device looks like any other: nobody may take a step with it.
        self._lower.check_end()
        accumulates = self._state is not None and self._state.gradients.is_accumulating
        caller = self._caller
        try:
            heard = self._exchange([not ok, caller.wants_pause, caller.is_leaving, self._kept.is_sending, accumulates])
        except RuntimeError as error:
            if not is_network_error(error):
                raise
            outcome = self._caller.resolve_vote(error)
            if outcome is None:
                if self.can_stay and self._rejoin(None):
                    return False
                raise Leave from None
            taken, self._must_leave = outcome, True
        else:
            if not heard.is_alike:
                self._refuse_slices()
            rejected, pause, somebody_leaves, somebody_sends, accumulates = heard.said
            self._must_compare_gradients = accumulates and not self._has_compared_gradients
            self._kept.is_anybody_sending = somebody_sends
            taken, self._must_leave = not rejected, pause
            self._must_hand_over = somebody_leaves
        self.position = self.position.after(self._unresolved)
        self._unresolved = None
        self._num_steps_here += 1
        self._caller.note_step()
        self._in_step = self.last_taken = taken
        return taken

    def _exchange(self, says: list[bool]) -> _Heard:
        """Tell all ranks `_NUM_SAID` things, and hear them. Called by every rank."""
        digest = self._digest_of_batch()
        vote = torch.tensor([*says, digest, -digest], dtype=torch.int64, device="cpu")
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._lower.control)
        *said, largest, smallest_negated = vote.tolist()
        return _Heard([bool(one) for one in said], largest == -smallest_negated)

    def _compare_gradients(self, gradients: Gradients) -> None:
        self._has_compared_gradients, self._must_compare_gradients = True, False
        unlike = find_unlike(all_gather_json(gradients.describe(), self._lower.control))
        if unlike is not None:
            name, one, other = unlike
            raise ConfigError(
                f"keeping gradients over commits at step {self.position.step}: ranks {one} and {other} hold the same "
                f"part of {name!r} with different values, and a rank that dies would lose its part; "
                f"{GRADIENT_ADVICE}"
            )

    def _digest_of_batch(self) -> int:
        """32 bits, equal where ranks cut up the same batch in the same way."""
        batch = [self._cut, self._unresolved]
        return crc32(json.dumps(batch).encode(), 0 if self._reading is None else self._reading.digest)

    def _refuse_slices(self) -> NoReturn:
        doing = f"committing step {self.position.step + 1}"
        unlike = describe_unlike(all_gather_json(self._cut, self._lower.control), lambda rank: f"rank {rank}")
        if unlike is not None:
            raise ConfigError(
                f"{doing}: ranks call job.batches with different arguments: {unlike}, and slices of different batches "
                "lose and repeat samples; give all ranks the same"
            )
        assert self._reading is not None
        read = f"{self._reading.describe()} (digest {self._reading.digest:08x})"
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
        return self._kept.save(self._state, self.position, self.options.checkpoint)

    def finish(self) -> None:
        """The training function has returned: nothing may be left open."""
        self.boundary()
        self.check_resolved("ending the job")

    def check_resolved(self, doing: str) -> None:
        """The batch that was handed out is taken or dropped: else the position in the data stands still."""
        if self._unresolved is not None:
            raise ConfigError(
                f"{doing}: the last batch was neither committed nor dropped; call job.commit() for each batch, or "
                "job.commit(ok=False) to drop it"
            )

    def hold(self) -> HeldState | None:
        """The state to keep while the network is gone.

        What it was given, as long as nothing is carried on the new mesh, and what it has there where others may have
        nothing else any more; None when this rank was hit in the middle of taking a step, so that its state belongs to
        no step at all.
        """
        if self._state is None:
            if self._filling is not None and self._filling.in_doubt is not None:
                return self._filling.in_doubt
            is_torn = self._filling is not None and self._filling.is_torn
            return None if is_torn else self._held
        if self._in_step:
            return None
        return self._hold(self._state)

    def _hold(self, state: CarriedState) -> HeldState:
        return state.hold(self.position.step, self.position.samples, self.position.line)

    def boundary(self) -> None:
        """Between two steps: the last one is complete, and this rank may leave."""
        self._in_step = False
        if self._state is not None and self._unresolved is None:
            self._state.gradients.keep()
            if self._must_compare_gradients:
                self._compare_gradients(self._state.gradients)
        if self._must_hand_over:
            assert self._state is not None
            self._must_hand_over = False
            is_leaving = self._caller.is_leaving
            self.is_dispensable = self._kept.hand_over(self._state, self.position, is_leaving) and is_leaving
        if self._must_leave and not (self.can_stay and self._rejoin(None)):
            raise Leave
