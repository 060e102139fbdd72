"""Data position: where a job stands in all that it reads, counted globally so that it outlives every mesh.

Definitions. The *sample stream* of a dataset is the concatenation of one permutation of it per epoch; each permutation
follows from (seed, epoch) alone. A *reading* is one call of ``job.batches``, known by its place in the program: what
is called before a loop of epochs, in it, and after it is counted by itself. A *source* is a dataset with how far it was
read; all readings of one dataset go on where the last one stopped. A *position* is how many batches are behind the job,
with its sources and readings. The next batch of a reading is the next ``batch_size`` samples of its source, whatever
the mesh: batches run across the end of an epoch, so none is short but the last of a reading. A rank's *share* of a
batch is a contiguous part of it that follows from the number of data-parallel ranks.

Because none of this knows the mesh, a change of world size can neither lose nor repeat a sample. A program that is
entered again makes the same calls in the same order: those behind the job yield nothing, the others go on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from remesh.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SampleSource:
    """A stream of samples that a job reads: a map-style dataset in its orders, or an iterable."""

    known: str = ""
    """What is known of it, as JSON text; equal as long as it is the same one."""
    samples: int = 0
    """Samples of it in the batches that are behind the job. Invariant: >= 0."""
    epoch: int = 0
    """Of an iterable: passes over it that a reading has left behind."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One call of ``job.batches`` that has begun and is not behind the job yet, or not all before it are."""

    source: str
    """Key of what it reads."""
    first: int = 0
    """Samples of its source that were behind the job when it began."""
    first_epoch: int = 0
    steps: int = 0
    """Batches of it that are behind the job."""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """The steps and samples that the job has completed, and where it stands in all that it reads.

    >>> position = Position().began("0", "0", SampleSource("ten")).after(4, "0")
    >>> position.sources["0"].samples, position.readings["0"].steps, position.mark
    (4, 1, 0)
    >>> ended = position.ended("0")
    >>> ended.is_done("0"), ended.readings, ended.mark
    (True, {}, 1)
    """

    step: int = 0
    """Batches resolved: taken by all ranks, or dropped by all. Invariant: >= 0."""
    samples: int = 0
    """Samples in those batches. Invariant: >= 0."""
    line: int = 0
    """The generation in which the job last began or went back: equal steps of two lines may be different states."""
    mark: int = 0
    """What has happened since the step, counted: the next call of the job, readings begun and ended. The tensors of
    two marks of a step go together; plain values are those of the later one."""
    epoch: int = 0
    """Of ``job.epochs``."""
    sources: Mapping[str, SampleSource] = field(default_factory=dict)
    """By the name of the reading that used each first."""
    readings: Mapping[str, Reading] = field(default_factory=dict)
    """By name: where in the program it is called, and its number there."""
    num_done: Mapping[str, int] = field(default_factory=dict)
    """Place in the program -> how many readings there are behind the job without a gap; ``readings`` lacks them."""
    last: Mapping[str, Reading] = field(default_factory=dict)
    """By name the reading that is behind the job as far as its limits went, where nothing has been read since."""

    def after(self, num_samples: int, name: str | None = None) -> Position:
        """The position once a batch of this many samples is resolved, of this reading."""
        sources, readings = self.sources, self.readings
        if name is not None and (reading := readings.get(name)) is not None:
            source = sources[reading.source]
            sources = {**sources, reading.source: replace(source, samples=source.samples + num_samples)}
            readings = {**readings, name: replace(reading, steps=reading.steps + 1)}
        step, samples = self.step + 1, self.samples + num_samples
        return replace(self, step=step, samples=samples, mark=0, sources=sources, readings=readings, last={})

    def marked(self) -> Position:
        """The same, once more has happened since the step."""
        return replace(self, mark=self.mark + 1)

    def began(self, name: str, key: str, source: SampleSource) -> Position:
        """With a reading that begins here, of the source of this key as it is now."""
        reading = Reading(key, source.samples, source.epoch)
        sources, readings = {**self.sources, key: source}, {**self.readings, name: reading}
        return replace(self, sources=sources, readings=readings, last={}).marked()

    def is_done(self, name: str) -> bool:
        """Whether this reading is behind the job."""
        where, number = split_name(name)
        return number < self.num_done.get(where, 0) or (name in self.readings and self.readings[name].is_done)

    def ended(self, name: str, epoch: int = 0, *, is_left: bool = False) -> Position:
        """With this reading behind the job, by its limits or left; ``epoch`` counts the passes over an iterable."""
        if self.is_done(name):
            return self
        where, number = split_name(name)
        readings, num_done = dict(self.readings), self.num_done.get(where, 0)
        key = readings[name].source
        readings[name] = replace(readings[name], is_done=True)
        while (done := f"{where}{num_done}") in readings and readings[done].is_done:
            del readings[done]
            num_done += 1
        sources = {**self.sources, key: replace(self.sources[key], epoch=epoch)}
        counts = {**self.num_done, where: num_done}
        last = {} if is_left or num_done != number + 1 else {name: self.readings[name]}
        return replace(self, sources=sources, readings=readings, num_done=counts, last=last).marked()

    def reopened(self) -> Position:
        """With the last reading not behind the job: one that is started again may have other limits, and reads on."""
        readings, counts = {**self.readings, **self.last}, dict(self.num_done)
        for where, number in map(split_name, self.last):
            counts[where] = number
        return replace(self, readings=readings, num_done=counts, last={})

    def next_epoch(self, where: str) -> Position:
        """In the next epoch: all readings that are called at this place begin again."""
        readings = {name: one for name, one in self.readings.items() if split_name(name)[0] != where}
        counts = {other: count for other, count in self.num_done.items() if other != where}
        return replace(self, epoch=self.epoch + 1, readings=readings, num_done=counts, last={}).marked()

    def to_text(self) -> str:
        """What is neither step, samples nor line; travels among the plain values of a state."""
        fields = {name: getattr(self, name) for name in ("mark", "epoch", "num_done")}
        parts = {
            key: {name: asdict(one) for name, one in getattr(self, key).items()}
            for key in ("sources", "readings", "last")
        }
        return json.dumps(fields | parts)

    @classmethod
    def from_text(cls, step: int, samples: int, line: int, text: str | None) -> Position:
        """The position of a state. A state without a text has one reading, of an unknown source."""
        if text is None:
            known = SampleSource(samples=samples)
            return cls(step, samples, line, sources={"0": known}, readings={"0": Reading("0", steps=step)})
        fields = json.loads(text)
        fields["sources"] = {name: SampleSource(**one) for name, one in fields["sources"].items()}
        for key in ("readings", "last"):
            fields[key] = {name: Reading(**one) for name, one in fields.get(key, {}).items()}
        return cls(step, samples, line, **fields)


def split_name(name: str) -> tuple[str, int]:
    """Where in the program a reading is called, and its number there.

    >>> split_name("e12"), split_name("0")
    (('e', 12), ('', 0))
    """
    where = name.rstrip("0123456789")
    return where, int(name[len(where) :])


@dataclass(frozen=True, slots=True)
class Share:
    """One data-parallel rank's part of a batch."""

    indices: tuple[int, ...]
    """Dataset indices to fetch. Never empty: a rank without a sample of its own borrows the first of the batch."""
    weight: float
    """Factor for a mean loss over ``indices``, so that the plain mean over ranks is the mean over the batch; 0 when the
    rank only borrows."""


def plan_batch(
    position: Position | SampleSource, *, num_samples: int, batch_size: int, seed: int, num_epochs: int | None
) -> tuple[int, ...]:
    """Dataset indices of the whole batch after ``position``; empty at the end of the stream."""
    if num_samples < 1 or batch_size < 1:
        raise ConfigError(f"planning batches of {batch_size} from {num_samples} samples: both must be at least 1")
    first = position.samples
    stop = first + batch_size
    if num_epochs is not None:
        stop = min(stop, num_epochs * num_samples)
    indices: list[int] = []
    while first < stop:
        epoch, at = divmod(first, num_samples)
        taken = min(stop - first, num_samples - at)
        indices.extend(_permutation(num_samples, seed, epoch)[at : at + taken].tolist())
        first += taken
    return tuple(indices)


def plan_share(batch: Sequence[int], *, dp_rank: int, dp_size: int) -> Share:
    """Part ``dp_rank`` of ``dp_size`` of a batch; parts differ by at most one sample, larger ones first."""
    base, extra = divmod(len(batch), dp_size)
    start = dp_rank * base + min(dp_rank, extra)
    part = tuple(batch[start : start + base + (dp_rank < extra)])
    if not part:
        return Share(tuple(batch[:1]), 0.0)
    return Share(part, len(part) * dp_size / len(batch))


def derive_seed(seed: int, *parts: int) -> int:
    """A 63-bit seed from a seed and any numbers, equal on every machine and release."""
    text = ":".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of one epoch. Philox is counter-based and its stream is stable across NumPy releases."""
    generator = np.random.Generator(np.random.Philox(derive_seed(seed, epoch)))
    return np.argsort(generator.random(num_samples), kind="stable")
