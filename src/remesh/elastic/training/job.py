"""The job object that a training function gets, once per generation.

    attempt   around a step: the program stays in its loop when a member is replaced
    carry     fill model and optimizer from peers' memory, else from the last checkpoint
    batches   the data stream, from where the job stands
    commit    all ranks take the step, or none does

A generation ends inside one of these calls, by :class:`Leave`, which user code must let pass. It derives from
BaseException so that ``except Exception`` does.

How a step is taken by all or by none: ``commit`` is one all-reduce of votes. A rank that sees its result knows that
every rank had voted. A rank whose all-reduce fails does not know; it goes to the meeting *in doubt*, and if any
survivor saw the result, the rank takes the step too, for its gradients are complete (see
:mod:`remesh.elastic.generation`).
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from remesh.checkpoint.storage import Location
from remesh.comm.lower import is_network_error
from remesh.elastic.events import EventLog
from remesh.elastic.state import CarriedState, Held
from remesh.elastic.training.fill import FillRules, Offers, fill_state
from remesh.elastic.training.place import Caller, JobOptions, Leave, Place
from remesh.elastic.training.position import Position, derive_seed, plan_batch, plan_share
from remesh.elastic.training.safekeeping import Safekeeping
from remesh.elastic.training.stream import ORDER_ADVICE, Stream
from remesh.errors import ConfigError, PeerError

_STALE_GROUP = "not initialized in the world group map"
"""What torch says of a group that was dropped."""


class Dataset(Protocol):
    """A map-style dataset, as torch's."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Job:
    """One rank's view of one generation."""

    def __init__(self, place: Place, held: Held | None, *, caller: Caller, options: JobOptions, log: EventLog) -> None:
        plan, rank, lower = place.plan, place.rank, place.lower
        assert lower.mesh is not None
        self.mesh: DeviceMesh = lower.mesh
        self.rank = rank
        self.world_size = len(plan.members)
        self.generation = plan.number
        self.reason = plan.reason
        """Why this mesh."""
        self.batch_weight = 1.0
        """Factor for this rank's mean loss, so that the mean over data-parallel ranks is the mean over the batch."""
        self._plan = plan
        self._lower = lower
        self._caller = caller
        self._options = options
        self._log = log
        self._held = held
        self._is_pretended = place.is_pretended
        self._snapshots = place.snapshots
        self._kept = Safekeeping(place, options, log)
        self._state: CarriedState | None = None
        self._position = Position()
        self._unresolved: int | None = None
        """Samples of the batch that was handed out and is not committed yet; None when there is none."""
        self._reading: Stream | None = None
        """What the batch was read from, if ranks must show that they read alike."""
        self._in_step = False
        self._must_leave = False
        self._must_hand_over = False
        self._is_dispensable = False
        self._last_taken = True
        self._filling: CarriedState | None = None
        self._uses_attempts = False
        """Whether the program has its steps in :meth:`attempt`."""
        self._num_steps_here = 0
        """Batches resolved since this rank entered its generation."""

    @property
    def step(self) -> int:
        """Batches behind the job."""
        return self._position.step

    @property
    def samples(self) -> int:
        """Samples behind the job, over all epochs."""
        return self._position.samples

    def carry(self, **objects: Any) -> None:
        """Fill models, optimizers and other objects with the job's state; called once, by all ranks.

        Boxes come from the memory of whoever holds them at the newest step; if some box is held by nobody, everything
        comes from the last checkpoint. A job that starts anew leaves the objects as they are. Blocks on all ranks.
        """
        if self._state is not None:
            raise ConfigError("carrying: this generation already carries state; name all objects in one call")
        if self._is_pretended:
            self._caller.bind()
            self._is_pretended = False
        self._boundary()
        self._fill(CarriedState(objects))

    def _fill(self, state: CarriedState) -> None:
        self._filling = state
        started_s = time.monotonic()
        host_of = {member.rank: self._plan.hosts[member.node] for member in self._plan.members}
        offers = Offers(self._held, self._snapshots)
        options = self._options
        rules = FillRules(options.checkpoint, options.save_every, self.generation, self._plan.is_behind)
        filled = fill_state(state, offers, host_of, rules)
        self._held, self._snapshots = None, ()
        self._state = state
        self._position = filled.position
        self._log.write(
            "filled",
            generation=self.generation,
            rank=self.rank,
            step=self.step,
            source=filled.source,
            reason=filled.reason,
            bytes_by_pair=[[*pair, count] for pair, count in sorted(filled.bytes_by_pair.items())],
            bytes_kept=filled.bytes_kept,
            bytes_from_disk=filled.bytes_from_disk,
            bound_bytes=filled.bound_bytes,
            move_seconds=filled.move_s,
            seconds=time.monotonic() - started_s,
        )

    def batches(
        self,
        dataset: Dataset | Stream,
        batch_size: int,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        data_axes: Sequence[str] = ("dp",),
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> Iterator[Any]:
        """This rank's shares of the global batches that lie ahead.

        ``batch_size`` counts samples over all ranks and stays the same on every mesh. The batch is shared among the
        ranks along ``data_axes`` (an axis that the mesh lacks counts as size 1); ranks along other axes get the same
        samples. An iterable dataset comes as a `Stream`, which every rank reads whole.
        Random state is seeded for each batch from (seed, step, share), so that it continues on any mesh.
        """
        if self._state is None:
            raise ConfigError("asking for batches: call job.carry(...) first, it tells where the data stream stands")
        dp_rank, dp_size = self._data_coordinate(data_axes)
        while max_steps is None or self.step < max_steps:
            self._boundary()
            # Asked of the step alone: a member that has just come in place of another knows no other reason.
            every = self._options.save_every
            if every and self.step and self.step % every == 0:
                self.save()
            if self._kept.is_snapshot_due(self.step):
                self._kept.take_snapshot(self._hold(self._state))
            if isinstance(dataset, Stream):
                self._reading = dataset
                source: Any = dataset.take(self.samples, batch_size, epochs, seed=self._options.seed)
                batch: Sequence[int] = range(len(source))
            else:
                self._reading = None
                source, batch = dataset, self._plan_batch(len(dataset), batch_size, epochs)
            if not batch:
                return
            share = plan_share(batch, dp_rank=dp_rank, dp_size=dp_size)
            self.batch_weight = share.weight
            self._unresolved = len(batch)
            seed_everything(derive_seed(self._options.seed, self.step, dp_rank))
            yield collate([source[index] for index in share.indices])

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around one step, from the batch to the optimizer: if a member is lost inside, the step is given up.

        Another member takes the place of the lost one, the groups behind :attr:`mesh` are made anew, and the next batch
        is this one again; ``train`` is not entered anew. Where that is not to be had (another shape, FSDP or DDP
        modules, groups that the program made itself), the error goes on, and ``train`` is entered on the new mesh.
        """
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
                "going on in a loop of steps: the program kept a process group of the mesh before; all enter train anew"
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
        self.generation, self.reason = place.plan.number, place.plan.reason
        self._plan, self._kept = place.plan, Safekeeping(place, self._options, self._log)
        self._must_leave = self._must_hand_over = self._is_dispensable = False
        self._unresolved, self._num_steps_here = None, 0
        self._state.drop_gradients()
        state, self._state = self._state, None
        self._held, self._snapshots = self._hold(state), place.snapshots
        self._fill(state)
        return True

    def commit(self, ok: bool = True) -> bool:
        """Vote on the batch just computed; True on all ranks if all said ``ok``, and then all take the step.

        Take it right after (optimizer, scheduler, averages), without collectives in between: clip gradients before.
        False drops the batch on all ranks. Blocks on all ranks, bounded by the group's timeout.
        """
        if self._unresolved is None:
            raise ConfigError("committing: no batch is open; call commit once for each batch of job.batches(...)")
        digest = 0 if self._reading is None else self._reading.digest
        votes = [not ok, self._caller.wants_pause, self._caller.is_leaving, self._kept.is_sending, digest, -digest]
        vote = torch.tensor(votes, dtype=torch.int64)
        try:
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._lower.control)
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
            rejected, pause, somebody_leaves, somebody_sends, largest, smallest_negated = vote.tolist()
            if largest != -smallest_negated:
                self._refuse_orders(digest)
            self._kept.is_anybody_sending = bool(somebody_sends)
            taken, self._must_leave = not rejected, bool(pause)
            self._must_hand_over = bool(somebody_leaves)
        self._position = self._position.after(self._unresolved)
        self._unresolved = None
        self._num_steps_here += 1
        self._caller.note_step()
        self._in_step = self._last_taken = taken
        return taken

    def _refuse_orders(self, digest: int) -> NoReturn:
        read = "indices" if self._reading is None else self._reading.describe()
        raise ConfigError(
            f"committing step {self.step + 1}: ranks did not read the same samples in the same order; rank {self.rank} "
            f"read {read} (digest {digest:08x}), and slices of different orders lose and repeat samples; {ORDER_ADVICE}"
        )

    def save(self) -> Location:
        """Save the carried state under the job's checkpoint folder; called by all ranks, blocks on them."""
        if self._options.checkpoint is None or self._state is None:
            raise ConfigError(
                "saving: the job needs a folder (remesh.elastic(..., checkpoint=...)) and state (job.carry(...)) first"
            )
        self._boundary()
        return self._kept.save(self._state, self._position, self._options.checkpoint)

    def log(self, kind: str, **values: Any) -> None:
        """Write an event (JSON values) with this rank's step and generation, for the terminal view and the report."""
        self._log.write(kind, step=self.step, generation=self.generation, rank=self.rank, **values)

    # --- for the worker around the job ---

    def finish(self) -> None:
        """The training function has returned: nothing may be left open."""
        self._boundary()
        if self._unresolved is not None:
            raise ConfigError(
                "ending: the last batch was neither committed nor dropped; call job.commit() for each batch"
            )

    @property
    def last_taken(self) -> bool:
        """Whether the last resolved batch was taken."""
        return self._last_taken

    @property
    def is_dispensable(self) -> bool:
        """Whether this rank was asked to leave, and the job loses nothing without what it holds."""
        return self._is_dispensable

    def hold(self) -> Held | None:
        """The state to keep while the network is gone.

        What it was given, as long as nothing is carried on the new mesh; None when this rank was hit in the middle of
        taking a step, so that its state belongs to no step at all.
        """
        if self._state is None:
            is_torn = self._filling is not None and self._filling.is_torn
            return None if is_torn else self._held
        if self._in_step:
            return None
        return self._hold(self._state)

    def _hold(self, state: CarriedState) -> Held:
        return state.hold(self.step, self.samples, self._position.line)

    def _boundary(self) -> None:
        """Between two steps: the last one is complete, and this rank may leave."""
        self._in_step = False
        if self._must_hand_over:
            assert self._state is not None
            self._must_hand_over = False
            is_leaving = self._caller.is_leaving
            self._is_dispensable = self._kept.hand_over(self._state, self._position, is_leaving) and is_leaving
        if self._must_leave and not (self.can_stay and self._rejoin(None)):
            raise Leave

    def _plan_batch(self, num_samples: int, batch_size: int, num_epochs: int | None) -> tuple[int, ...]:
        seed = self._options.seed
        return plan_batch(
            self._position, num_samples=num_samples, batch_size=batch_size, seed=seed, num_epochs=num_epochs
        )

    def _data_coordinate(self, data_axes: Sequence[str]) -> tuple[int, int]:
        """This rank's place among the ranks that share a batch, and how many they are."""
        names = self.mesh.mesh_dim_names or ()
        place, size = 0, 1
        for axis in data_axes:
            if axis in names:
                place = place * self.mesh[axis].size() + self.mesh[axis].get_local_rank()
                size *= self.mesh[axis].size()
        return place, size


def seed_everything(seed: int) -> None:
    """Seed torch (all devices) and Python."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        # What the other does to the processor's generator. It looks for all kinds of devices first, in 0.15 ms a step.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()
