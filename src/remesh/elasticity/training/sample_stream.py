"""Stream of samples from an iterable dataset, read alike on every rank and continued after a change of mesh.

An iterable dataset has no indices to share out. So every rank reads the whole stream and keeps its share of each batch;
what a rank reads follows from the position alone, and a change of the number of ranks can neither lose nor repeat a
sample. Reading costs each rank the work of all: an iterable that is expensive should read lazily, or be map-style.

Going to a position, in this order:

1. The batch that was handed out last is kept until the next one: a batch that came to nothing is handed out again.
2. An iterable with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``, is carried with
   the job (``job.carry(..., data=stream)``): its state at the position is put back, on new ranks too.
3. Any other is begun anew, and as many samples are passed over as lie behind the job.

An epoch is one pass over the iterable. If it has ``set_epoch`` it is called with the epoch, so that it may shuffle. It
is read with random state that follows from (seed, epoch), and from (seed, epoch, position) once it goes on from a
state: so a loader that shuffles by the process's generators has one order on all ranks. What was read has a digest;
ranks compare it with each vote, and a stream that comes to a position again with what was read before
(:mod:`remesh.elasticity.training.reading`). A loader with an order of its own is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from remesh.elasticity.training.position import derive_seed
from remesh.elasticity.training.reading import Chance, digest_of
from remesh.foundation.errors import ConfigError
from remesh.foundation.torch_private import never_compiled

ORDER_ADVICE = (
    "its order must follow from the epoch alone: shuffle by torch's, Python's or NumPy's own random state or by "
    "set_epoch(epoch), not by a generator of its own, a clock or the rank; or give a map-style dataset to job.batches"
)


@never_compiled
class Stream:
    """An iterable dataset that every rank reads in the same order; give it to ``job.carry`` and to ``job.batches``.

    ``dataset`` yields single samples: a loader around it must not make batches (``batch_size=None``).
    """

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__iter__"):
            raise ConfigError(
                f"making a stream: expected an iterable dataset, found {type(dataset).__name__}; give a map-style "
                "dataset to job.batches directly"
            )
        self._dataset = dataset
        self._is_stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._iterator: Iterator[Any] | None = None
        self._chance = Chance()
        self._seed = 0
        self._epoch = 0
        self._read = 0
        """Samples of the stream that were read so far."""
        self._digest = 0
        """Of all of them, in their order."""
        self._known: tuple[int, int] | None = None
        """A number of samples and their digest, as they were read before."""
        self._digest_before = 0
        """Where the batch began that was handed out last."""
        self._last_start = 0
        """Position of the batch that was handed out last."""
        self._last: list[Any] = []
        self._state_before: tuple[int, Any] | None = None
        """Epoch and state of the dataset where the last batch began; None for a dataset without state."""

    def take(self, position: int, count: int, num_epochs: int | None, *, seed: int = 0) -> list[Any]:
        """The next ``count`` samples from ``position`` on; fewer, or none, only at the end of the last epoch.

        Raises `ConfigError` for a stream that is empty, or another one, or shorter than it was before.
        """
        if position == self._last_start and len(self._last) == count:
            return self._last
        self._seed = seed
        with self._chance.in_force():
            self._go_to(position, num_epochs)
            if self._is_stateful:
                # A rank that comes later has the state of the dataset, but not what was drawn before.
                self._chance.begin(derive_seed(seed, self._epoch, position))
            self._last_start, self._state_before, self._digest_before = position, self._state(), self._digest
            self._last = self._read_samples(count, num_epochs)
        return self._last

    @property
    def epoch(self) -> int:
        """Passes over the iterable that have come to their end."""
        return self._epoch

    @property
    def digest(self) -> int:
        """The digest (32 bits) of all samples up to the end of the last batch; equal where ranks read the same."""
        return self._digest

    def describe(self) -> str:
        """What is read, for messages: the type of the iterable, and what chooses its order."""
        sampler = getattr(self._dataset, "sampler", None)
        return type(self._dataset).__name__ + ("" if sampler is None else f" with a {type(sampler).__name__}")

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream: before the current batch, and after it once the job asks for the next one."""
        before = self._state_before
        dataset = None if before is None else {"epoch": before[0], "state": before[1]}
        return {"samples": self._last_start, "digest": self._digest_before, "dataset": dataset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in ``state``."""
        self._last = []
        before, samples, digest = state["dataset"], int(state["samples"]), int(state.get("digest", 0))
        # A state without a digest still has the place.
        self._known = (samples, digest) if "digest" in state else None
        if before is None or not self._is_stateful:
            self._begin_anew()
            # What `state_dict` returns until it has read up to there.
            self._last_start, self._digest_before = samples, digest
            self._state_before = None
        else:
            self._stand_at(int(before["epoch"]), before["state"], samples, digest)

    def _stand_at(self, epoch: int, state: Any, samples: int, digest: int) -> None:
        self._iterator, self._last = None, []
        self._state_before = epoch, copy.deepcopy(state)
        self._dataset.load_state_dict(state)
        self._epoch = epoch
        self._read = self._last_start = samples
        self._digest = self._digest_before = digest

    def _begin_anew(self) -> None:
        self._iterator = None
        self._epoch = self._read = self._last_start = self._digest = self._digest_before = 0

    def _state(self) -> tuple[int, Any] | None:
        """A copy, for what a dataset gives may change with it; it becomes text only when it is asked for."""
        return (self._epoch, copy.deepcopy(self._dataset.state_dict())) if self._is_stateful else None

    def _go_to(self, position: int, num_epochs: int | None) -> None:
        if position < self._read:
            if position == self._last_start and self._state_before is not None:
                epoch, state = self._state_before
                self._stand_at(epoch, copy.deepcopy(state), position, self._digest_before)
            else:
                self._begin_anew()
        known = 0 if self._known is None else self._known[0]
        if self._read < known <= position:
            self._pass_over(known, num_epochs)
            self._check_known()
        self._pass_over(position, num_epochs)

    def _pass_over(self, position: int, num_epochs: int | None) -> None:
        while self._read < position:
            passed = len(self._read_samples(min(position - self._read, 1024), num_epochs))
            if not passed:
                raise ConfigError(
                    f"continuing a stream at sample {position}: it ended after {self._read}; give the iterable that "
                    "the job was started with"
                )

    def _check_known(self) -> None:
        assert self._known is not None
        position, expected = self._known
        if self._digest != expected:
            raise ConfigError(
                f"continuing a stream at sample {position}: {self.describe()} gives other samples up to there, or "
                f"another order, than before (digest {self._digest:08x}, expected {expected:08x}); {ORDER_ADVICE}"
            )

    def _read_samples(self, count: int, num_epochs: int | None) -> list[Any]:
        found: list[Any] = []
        was_empty = False
        while len(found) < count:
            if self._iterator is None:
                if num_epochs is not None and self._epoch >= num_epochs:
                    break
                if hasattr(self._dataset, "set_epoch"):
                    self._dataset.set_epoch(self._epoch)
                self._chance.begin(derive_seed(self._seed, self._epoch))
                self._iterator = iter(self._dataset)
            before = len(found)
            for sample in self._iterator:
                found.append(sample)
                self._digest = digest_of(sample, self._digest)
                if len(found) == count:
                    break
            else:
                self._iterator = None
                self._epoch += 1
                if len(found) == before and was_empty:
                    raise ConfigError("reading a stream: two epochs in a row were empty; give an iterable with samples")
                was_empty = len(found) == before
        self._read += len(found)
        return found
