"""Job object that a training function gets, once per generation.

    attempt   around a step: the program stays in its loop when a member is replaced
    carry     fill model and optimizer from peers' memory, else from the last checkpoint
    epochs    the epochs that are not behind the job
    batches   the data stream, from where the job stands
    commit    all ranks take the step, or none does

A generation ends inside one of these calls, by :class:`Leave`, which user code must let pass. It derives from
BaseException so that ``except Exception`` does.

What stands behind it, for the worker around it, is the `TrainingSession`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from remesh.checkpoint.storage import Location
from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.training.position import derive_seed, plan_batch, plan_share
from remesh.elasticity.training.reading import digest_of_dataset
from remesh.elasticity.training.readings import Identity
from remesh.elasticity.training.sample_stream import Stream
from remesh.elasticity.training.seeds import seed_everything
from remesh.elasticity.training.session import TrainingSession
from remesh.foundation.errors import ConfigError
from remesh.foundation.options import check_option
from remesh.foundation.torch_private import never_compiled

_BATCH_OPTIONS: dict[str, Any] = {
    "batch_size": int,
    "epochs": int | None,
    "max_steps": int | None,
    "data_axes": Sequence[str],
}


class Dataset(Protocol):
    """A map-style dataset, as torch's."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@never_compiled
class Job:
    """The elastic job as a rank sees it on one mesh; ``train`` is called with one."""

    def __init__(self, session: TrainingSession, log: EventLog) -> None:
        self._session = session
        self._log = log
        self.mesh: DeviceMesh = session.mesh
        self.rank: int = session.rank
        self.world_size = len(session.plan.members)
        self.batch_weight = 1.0
        """Factor for this rank's mean loss, so that the mean over data-parallel ranks is the mean over the batch."""

    @property
    def generation(self) -> int:
        """Number of the generation, from 1."""
        return self._session.plan.number

    @property
    def reason(self) -> str:
        """Why the job has this mesh, in words."""
        return self._session.plan.reason

    @property
    def step(self) -> int:
        """Number of batches that the job has trained on."""
        return self._session.position.step

    @property
    def samples(self) -> int:
        """Number of samples that the job has trained on, over all epochs."""
        return self._session.position.samples

    def carry(self, *, window_bytes: int | None = None, **objects: Any) -> None:
        """Fill models, optimizers and other objects with the job's state; called once, by all ranks.

        Each shard comes from the memory of a rank that holds it at the newest step. If no rank or snapshot holds some
        shard, all state comes from the last checkpoint. A new job leaves the objects as they are. Blocks on all ranks.

        With ``window_bytes`` the moments of fresh optimizers are made a few at a time, so many bytes in one go on each
        rank, and old shards are given up as they leave. A rank that is lost meanwhile takes along what it alone has
        by then, as at any time after: keep replicas, snapshots or checkpoints.
        """
        self._session.carry(objects, window_bytes)

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
        """This rank's part of each global batch, from the job's position in the data to the end.

        ``batch_size`` counts samples over all ranks and stays the same on every mesh. The batch is shared among the
        ranks along ``data_axes`` (an axis that the mesh lacks counts as size 1); ranks along other axes get the same
        samples. An iterable dataset comes as a `Stream`, which every rank reads whole.
        Random state is seeded for each batch from (seed, step, share), so that it continues on any mesh.

        It may be called again, for another dataset or the same one, whose samples then go on where they stopped;
        ``epochs`` and ``max_steps`` count from there. ``train`` makes the same calls in the same order on each mesh:
        those whose batches are behind the job yield none.
        """
        given: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs, "max_steps": max_steps}
        given["data_axes"] = data_axes
        for name, expected in _BATCH_OPTIONS.items():
            check_option("asking for batches", name, given[name], expected)
        # Numbered now, and not with the first batch: the next mesh may ask for batches of several in another order.
        return self._read(self._session.readings.call(), dataset, given, collate)

    def _read(
        self, name: str, dataset: Dataset | Stream, given: Mapping[str, Any], collate: Callable[[list[Any]], Any]
    ) -> Iterator[Any]:
        session, seed = self._session, self._session.options.seed
        stream = dataset if isinstance(dataset, Stream) else None
        axes = [axis for axis in given["data_axes"] if axis in (self.mesh.mesh_dim_names or ())]
        dp_rank, dp_size = self._data_coordinate(axes)

        def cut() -> dict[str, Any]:
            size = len(dataset) if not isinstance(dataset, Stream) else "that of a stream"
            return {**given, "data_axes": axes, "len(dataset)": size}

        session.begin_reading(name, dataset, _identity_of(dataset, seed))
        if session.position.is_done(name):
            return
        ended: Stream | None = None
        try:
            while session.goes_on(name, given["max_steps"]):
                session.keep_state()
                source, batch = self._next_batch(name, dataset, given["batch_size"], given["epochs"])
                if not batch:
                    ended = stream
                    break
                share = plan_share(batch, dp_rank=dp_rank, dp_size=dp_size)
                self.batch_weight = share.weight
                session.open_batch(name, len(batch), stream, cut())
                seed_everything(derive_seed(seed, self.step, dp_rank))
                yield collate([source[index] for index in share.indices])
                session.check_resolved("asking for the next batch: it would be the same one again")
        except GeneratorExit:
            session.leave_batches(name, 0 if stream is None else stream.epoch)
            raise
        session.end_batches(name, ended, cut(), 0 if stream is None else stream.epoch)

    def _next_batch(
        self, name: str, dataset: Dataset | Stream, batch_size: int, epochs: int | None
    ) -> tuple[Any, Sequence[int]]:
        """What the next batch of a reading is taken from, and which of it; an empty one at the end."""
        seed, position = self._session.options.seed, self._session.position
        reading = position.readings.get(name)
        if reading is None:  # the others had ended it, and this rank has gone on from theirs
            return dataset, ()
        source = position.sources[reading.source]
        if not isinstance(dataset, Stream):
            size = len(dataset)
            stop = math.inf if epochs is None else reading.first + epochs * size
            count = int(min(batch_size, stop - source.samples))
            if size and not count:
                return dataset, ()
            return dataset, plan_batch(source, num_samples=size, batch_size=count, seed=seed, num_epochs=None)
        stop_epoch = None if epochs is None else reading.first_epoch + epochs
        samples = dataset.take(source.samples, batch_size, stop_epoch, seed=seed)
        if not samples and epochs and not reading.steps and reading.first:
            # A loop that was left at the end of a pass has not seen that it was one.
            self._session.readings.pass_over(name)
            samples = dataset.take(source.samples, batch_size, reading.first_epoch + 1 + epochs, seed=seed)
        return samples, range(len(samples))

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that the job has not completed, from 0 to ``count`` - 1.

        What the body of the loop does once an epoch (evaluate, step a scheduler, stop early) is done once, whatever
        happens: the epoch is over when the next one is asked for. Readings in the body go on with their datasets.
        """
        check_option("asking for epochs", "count", count, int)
        return self._session.epochs(count)

    def attempt(self) -> contextlib.AbstractContextManager[None]:
        """A context manager around one step, from batch to optimizer: if a rank is lost in it, the step is dropped.

        A spare takes the lost rank, the process groups behind :attr:`mesh` are rebuilt, and the next batch is this one
        again; ``train`` is not called again. This is not possible when the mesh changes its shape, with FSDP or DDP
        modules, or with process groups that the program made: then ``train`` is called again on the new mesh.
        """
        return self._session.attempt()

    def commit(self, ok: bool = True) -> bool:
        """Vote on the batch just computed: True on all ranks if all of them gave ``ok``.

        Then call the optimizer, scheduler and averages at once, without collectives in between: clip gradients before.
        False means that all ranks drop the batch. Blocks on all ranks, bounded by the group's timeout.
        """
        return self._session.vote(ok)

    def save(self) -> Location:
        """Save the carried state under the job's checkpoint folder; called by all ranks, blocks on them."""
        return self._session.save()

    def log(self, kind: str, /, **values: Any) -> None:
        """Write an event (JSON values) with this rank's step and generation, for the terminal view and the report."""
        own = {"step": self.step, "generation": self.generation, "rank": self.rank}
        if clash := sorted(own.keys() & values):
            raise ConfigError(f"logging {kind!r}: {clash[0]!r} is a field of the log itself; choose another name")
        self._log.write(kind, **own, **values)

    def _data_coordinate(self, axes: Sequence[str]) -> tuple[int, int]:
        """This rank's place among the ranks that share a batch, those along ``axes`` of the mesh, and their number."""
        place, size = 0, 1
        for axis in axes:
            place = place * self.mesh[axis].size() + self.mesh[axis].get_local_rank()
            size *= self.mesh[axis].size()
        return place, size


def _identity_of(dataset: Dataset | Stream, seed: int) -> Identity:
    if isinstance(dataset, Stream):
        return Identity(None, seed, lambda: None)
    return Identity(len(dataset), seed, lambda: digest_of_dataset(dataset, seed))
