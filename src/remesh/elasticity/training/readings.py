"""Readings of a program: which call of ``job.batches`` is which, and whether it still reads what it read before.

A program that is entered again makes the same calls in the same order. So a reading is known by its place: before a
loop of epochs (``0``, ``1``, ...), in its body (``e0``), after it (``a0``). A dataset is known by the object: readings
of one object share its source, which has the name of the reading that used it first.

What a source is known by (length, seed, digest of a sample) is compared when a program uses it first after its state
came from elsewhere. Another one is refused: samples would come twice, or never.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from traceback import walk_stack
from types import CodeType
from typing import Any

from remesh.elasticity.training.position import Position, Reading, SampleSource
from remesh.foundation.errors import ConfigError

_Place = tuple[CodeType, int]
"""An instruction of a function."""


class OnChange(Enum):
    """What becomes of a reading whose dataset is not the one that it read before."""

    REFUSE = "refuse"
    CONTINUE = "continue"
    """Go on at the number of samples that are behind the job."""
    BEGIN = "begin"
    """Read the new one from its beginning."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a dataset is known by."""

    length: int | None
    """None for an iterable."""
    seed: int
    digest: Callable[[], int | None]
    """Of a sample, if it is the same at every look. Reads the dataset."""

    def describe(self, *, with_digest: bool) -> dict[str, Any]:
        """By name, for comparing."""
        return {"length": self.length, "seed": self.seed} | ({"digest": self.digest()} if with_digest else {})


@dataclass(frozen=True, slots=True)
class _Left:
    """A loop that is left: by the program, or by an error that passes through it."""

    end: Callable[[Position], Position]
    """The position once it is behind the job."""
    values: Any
    """The program's plain values then."""
    places: Sequence[_Place] = field(default_factory=lambda: _places_in_program())
    """Where the program was, from the inside outwards."""

    def is_before(self, raised: Collection[_Place]) -> bool:
        """Whether the program left it before an error that was raised at these places.

        An error leaves a loop at the instruction at which it is raised there; a ``break`` is another one.
        """
        codes = {code for code, _ in raised}
        place = next((place for place in self.places if place[0] in codes), None)
        return place is not None and place not in raised


class Readings:
    """The readings of one program, from entering ``train`` on."""

    def __init__(self, on_change: OnChange = OnChange.REFUSE) -> None:
        self.position = Position()
        self._on_change = on_change
        self._where = ""
        self._counts: dict[str, int] = {}
        """Calls so far, by their place in the program."""
        self._keys: dict[int, str] = {}
        """Address of a dataset -> key of its source."""
        self._objects: list[Any] = []
        """The datasets, so that no other one gets an address of theirs."""
        self._unproved: set[str] = set()
        """Keys of the sources whose datasets this program has not shown yet."""
        self._is_from_disk = False
        self._left: list[_Left] = []
        """Loops that were left in the middle since the last call of the job: behind it, if the program did so."""

    def stand_at(self, position: Position, *, is_from_disk: bool = False) -> None:
        """Go on from here. A digest is looked at where the state is not of this run."""
        self.position = position.reopened() if is_from_disk else position
        self._is_from_disk, self._left = is_from_disk, []
        self._unproved = position.sources.keys() - self._keys.values()

    def call(self) -> str:
        """A call of ``job.batches``: the name of its reading."""
        number = self._counts.get(self._where, 0)
        self._counts[self._where] = number + 1
        return f"{self._where}{number}"

    def is_known(self, name: str) -> bool:
        """Whether this reading has begun already, before the program was entered again or just now."""
        return name in self.position.readings or self.position.is_done(name)

    def begin(self, name: str, dataset: Any, identity: Identity) -> None:
        """The first batch of a reading is asked for: it begins, if it has not begun before."""
        known = self.position.readings.get(name)
        key = self._keys.get(id(dataset))
        if key is None:
            key = known.source if known is not None else name
            self._keys[id(dataset)] = key
            self._objects.append(dataset)
            if key in self.position.sources:
                self._meet_again(key, identity)
        if not self.is_known(name):
            source = self.position.sources.get(key) or SampleSource(_text(identity.describe(with_digest=True)))
            self.position = self.position.began(name, key, source)

    def _meet_again(self, key: str, identity: Identity) -> None:
        """A dataset that this program has not shown before, of a source that the job has."""
        source = self.position.sources[key]
        before: dict[str, Any] = json.loads(source.known) if source.known else {}
        is_resumed = key in self._unproved
        self._unproved.discard(key)
        look = bool(before.get("digest")) and (self._is_from_disk or not is_resumed)
        now = identity.describe(with_digest=look)
        unlike = [name for name, value in now.items() if before and value is not None and before.get(name) != value]
        if not unlike:
            return
        if is_resumed and self._on_change is OnChange.REFUSE:
            differences = ", ".join(f"{name} is {now[name]}, expected {before.get(name)}" for name in unlike)
            raise ConfigError(
                f"continuing to read at sample {source.samples}: this is not the dataset that was read before: "
                f"{differences}; samples would come twice or never; give the same dataset and seed, or choose: "
                'remesh.elastic(..., changed_data="begin") reads it from its beginning, "continue" goes on at that '
                "sample"
            )
        known = _text(identity.describe(with_digest=True))
        # A program that makes a dataset in each epoch reads each from its beginning.
        begins = not is_resumed or self._on_change is OnChange.BEGIN
        self._replace_source(key, SampleSource(known) if begins else replace(source, known=known), begins=begins)

    def _replace_source(self, key: str, source: SampleSource, *, begins: bool) -> None:
        readings: Mapping[str, Reading] = {
            name: replace(one, first=0, first_epoch=0) if begins and one.source == key else one
            for name, one in self.position.readings.items()
        }
        self.position = replace(self.position, sources={**self.position.sources, key: source}, readings=readings)

    def leave(self, name: str, epoch: int, values: Any) -> None:
        """The loop over this reading is left in the middle, with these plain values; ``epoch`` of an iterable."""
        self._left.append(_Left(lambda position: position.ended(name, epoch, is_left=True), values))

    def settle(self, error: BaseException | None = None) -> Any:
        """The program has called the job, or this error ends it: the loops that it left before are behind it.

        The plain values that it left the last of them with; None if there is none.
        """
        raised = None if error is None else _places_of(error)
        behind = [one for one in self._left if raised is None or one.is_before(raised)]
        for one in behind:
            self.position = one.end(self.position)
        self._left = []
        return behind[-1].values if behind else None

    def pass_over(self, name: str) -> None:
        """An iterable had ended where this reading of it begins, unnoticed: one pass more."""
        reading = self.position.readings[name]
        later = replace(reading, first_epoch=reading.first_epoch + 1)
        self.position = replace(self.position, readings={**self.position.readings, name: later})

    # --- epochs ---

    def end_epoch(self, epoch: int, values: Any) -> None:
        """The program asks for the epoch after this one."""
        # Else the others were in the next one, and this rank has theirs.
        self._left.append(_Left(lambda now: now.next_epoch("e") if now.epoch == epoch else now, values))

    def leave_epochs(self, count: int, values: Any) -> None:
        """The loop over so many epochs is left in the middle."""
        self._where = "a"
        self._left.append(_Left(lambda position: replace(position.next_epoch("e"), epoch=count), values))

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the job stands; what is called in the loop over them is counted by itself."""
        if self._where:
            raise ConfigError(
                "asking for epochs: the program has asked before, and a job has one number of epochs; write one loop "
                "over job.epochs(n), or call job.batches with epochs=... in others"
            )
        while self.position.epoch < count:
            self._where, self._counts["e"] = "e", 0
            yield self.position.epoch
            # A program may make a dataset in each epoch: they would all be kept.
            self._keys = {address: key for address, key in self._keys.items() if not key.startswith("e")}
            self._objects = [one for one in self._objects if id(one) in self._keys]
        self._where = "a"


def _places_in_program() -> Sequence[_Place]:
    frames = (frame for frame, _ in walk_stack(None))
    ours = __name__.partition(".")[0] + "."
    return [(one.f_code, one.f_lasti) for one in frames if not one.f_globals.get("__name__", "").startswith(ours)]


def _places_of(error: BaseException) -> set[_Place]:
    """The instructions at which an error was raised, and those before it that it followed from."""
    found: set[_Place] = set()
    pending, seen = [error], {id(error)}
    while pending:
        one = pending.pop()
        chained = [
            before for before in (one.__cause__, one.__context__) if before is not None and id(before) not in seen
        ]
        pending += chained
        seen |= set(map(id, chained))
        entry = one.__traceback__
        while entry is not None:
            found.add((entry.tb_frame.f_code, entry.tb_lasti))
            entry = entry.tb_next
    return found


def _text(known: Mapping[str, Any]) -> str:
    return json.dumps(known)
