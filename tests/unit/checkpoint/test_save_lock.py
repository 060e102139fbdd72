"""Two or three saves in one directory, in any order of their steps: a checkpoint is there whole, or it is not there.

A *saver* is a thread that saves as a job of one or two ranks does. A scheduler lets one of them do one step on the
store at a time, drawn from a seed, and may kill a saver before any step. The oracle knows values only: each saver
writes its own number into every tensor and into the common data, so a mixture shows.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.formats.data_file import dump_object
from remesh.checkpoint.formats.directory import (
    METRICS_FNAME,
    CheckpointingConfig,
    begin,
    check_can_save,
    check_is_distributed_checkpoint,
    finish,
    stage_small,
)
from remesh.checkpoint.formats.index_files import IndexFiles, stage_index
from remesh.checkpoint.formats.torch_format import BACKEND
from remesh.checkpoint.plain import load
from remesh.checkpoint.plan.writes import Written, assemble_index
from remesh.checkpoint.run.metrics_file import encode_metrics, read_metrics
from remesh.checkpoint.run.reader import open_checkpoint, why_incomplete
from remesh.checkpoint.run.writer import part_of, write_part, writing_in
from remesh.checkpoint.storage import location_of, store_of
from remesh.checkpoint.storage.checked_file import verify
from remesh.checkpoint.storage.save_lock import IN_PROGRESS_FNAME, SaveLock, held
from remesh.checkpoint.storage.store import LocalStore, NewFile
from remesh.checkpoint.values.entities import ShardedTensor
from remesh.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy
from tests.profiles import seeds

_PATIENCE_S = 60
_NUM_LOOKS = 25
_ACTS = (
    *("is_directory", "entries", "size_of", "read", "create", "create_once", "put", "write_soon", "settle", "rename"),
    *("remove", "make_directory", "sync_names"),
)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of errors may hold it up."""


@dataclass
class Scheduler:
    """Lets one thread at a time do one step, in an order drawn from a seed; some die at a step drawn, too."""

    rng: random.Random
    turns: dict[threading.Thread, threading.Semaphore] = field(default_factory=dict)
    dying: dict[threading.Thread, int] = field(default_factory=dict)
    """How many more steps a thread does; one that is not here lives."""
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def step(self) -> None:
        """Called by a thread before every step: returns when it is its turn."""
        thread = threading.current_thread()
        if thread not in self.turns:
            return
        self.arrived.release()
        assert self.turns[thread].acquire(timeout=_PATIENCE_S)
        if thread in self.dying:
            self.dying[thread] -= 1
            if self.dying[thread] < 0:
                raise Killed

    def run(self, acts: list[Callable[[], None]], dies_at: list[int | None]) -> None:
        """Run all to their ends, step by step."""
        threads = [threading.Thread(target=self._one, args=(act,), daemon=True) for act in acts]
        self.turns = {thread: threading.Semaphore(0) for thread in threads}
        self.dying = {thread: at for thread, at in zip(threads, dies_at, strict=True) if at is not None}
        for thread in threads:
            thread.start()
        for _ in threads:
            assert self.arrived.acquire(timeout=_PATIENCE_S)
        while alive := [thread for thread in threads if thread in self.turns]:
            self.turns[self.rng.choice(alive)].release()
            assert self.arrived.acquire(timeout=_PATIENCE_S)
        for thread in threads:
            thread.join(_PATIENCE_S)

    def _one(self, act: Callable[[], None]) -> None:
        try:
            self.step()
            act()
        except Killed:
            pass
        finally:
            del self.turns[threading.current_thread()]
            self.arrived.release()


@contextmanager
def steps_of(directory: str, scheduler: Scheduler) -> Iterator[None]:
    """Let every act on the store of the directory be a step, and the parts of writing a file, too."""

    def stepping(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **kwargs: Any) -> Any:
            scheduler.step()
            return act(*args, **kwargs)

        return acting

    def stepping_file(act: Callable[..., NewFile]) -> Callable[..., NewFile]:
        def acting(*args: Any, **kwargs: Any) -> NewFile:
            scheduler.step()
            file = act(*args, **kwargs)
            file.finish = stepping(file.finish)  # type: ignore[method-assign]
            return file

        return acting

    kind = type(store_of(location_of(directory)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("os.fdatasync", lambda descriptor: None)
        for name in _ACTS:
            patch.setattr(kind, name, (stepping_file if name == "create" else stepping)(getattr(kind, name)))
        yield


def save_as(number: int, num_ranks: int, directory: str, backend: str = BACKEND) -> None:
    """What the ranks of a job do when they save, one after another; the tensors have another size in every job."""
    finish(write_as(number, num_ranks, directory, backend), CheckpointingConfig(backend))


def write_as(number: int, num_ranks: int, directory: str, backend: str = BACKEND) -> SaveLock:
    """All of it but the commit."""
    place, rows = location_of(directory), 4 + number
    check_can_save(place, may_create=True)
    lock = begin(place)
    with held(lock):
        stage_small(lock, dump_object({"job": number, "ranks": num_ranks}, "the common data"))
        stage_small(lock, encode_metrics({"job": number}).encode(), METRICS_FNAME)
    tensors = [torch.full((rows, 3), float(number)) for _ in range(num_ranks)]
    shards = [ShardedTensor.from_rank_offsets("w", tensor, (0, at, num_ranks)) for at, tensor in enumerate(tensors)]
    if backend == "zarr":
        with writing_in(lock):
            ZarrSaveShardedStrategy().save(dict(enumerate(shards)), directory)
    else:
        _store_as_torch_dist(shards, lock)
    return lock


def _store_as_torch_dist(shards: list[ShardedTensor], lock: SaveLock) -> None:
    written = []
    for rank, shard in enumerate(shards):
        part = part_of([shard], {})
        written += Written.from_parts(write_part(part, part.tensors, lock, rank)[0])
    with held(lock):
        stage_index(lock, IndexFiles.of(assemble_index(written)))


def whose(directory: str) -> int | None:
    """The job whose checkpoint is there, whole in every part; None when there is none."""
    if not check_is_distributed_checkpoint(directory):
        return None
    place = location_of(directory)
    assert why_incomplete(place) == ""
    list(verify(place))
    number, num_ranks = (load({}, directory)[name] for name in ("job", "ranks"))
    loaded = load({"w": torch.zeros(num_ranks * (4 + number), 3)}, directory)
    assert loaded["w"].eq(number).all(), f"expected values of job {number} alone, found {loaded['w'].unique()}"
    assert read_metrics(place) == {"job": number}, "metrics are those of the job whose checkpoint it is"
    return int(number)


def look_again_and_again(directory: str) -> None:
    """A reader beside the savers: what it finds, if anything, is a checkpoint of theirs with its common data."""
    for _ in range(_NUM_LOOKS):
        try:
            found = open_checkpoint(location_of(directory), allow_native=True)
        except CheckpointingException:
            continue
        assert not found.is_native and {*found.common} == {"job", "ranks"}, "a look is torn by the commit"


def explore(directory: str, seed: int, backend: str = BACKEND) -> tuple[int, int]:
    """Run two or three savers, some of which die, and a reader.

    Returns the numbers of those that said "saved", and of those that lived.
    """
    rng = random.Random(seed)
    num_savers = rng.choice((2, 2, 3))
    saved: list[int] = []
    refused: list[int] = []

    def saver(number: int, num_ranks: int) -> Callable[[], None]:
        def run() -> None:
            try:
                save_as(number, num_ranks, directory, backend)
                saved.append(number)
            except CheckpointingException as raised:
                words = ("another save", "already holds a complete checkpoint")
                assert any(word in str(raised) for word in words), raised
                refused.append(number)

        return run

    dies_at = [rng.randrange(60) if rng.random() < 0.35 else None for _ in range(num_savers)]
    scheduler = Scheduler(rng)
    torn: list[AssertionError] = []

    def read() -> None:
        try:
            look_again_and_again(directory)
        except AssertionError as raised:
            torn.append(raised)

    with steps_of(directory, scheduler):
        savers = [saver(number, rng.choice((1, 2))) for number in range(1, num_savers + 1)]
        scheduler.run([*savers, read], [*dies_at, None])
    assert not torn, torn
    lived = sum(at is None for at in dies_at)
    assert len(saved) <= 1, f"savers {saved} were all told that their checkpoint is there"
    assert lived <= len(saved) + len(refused), "who lives is told one of the two"
    found = whose(directory)
    assert not saved or found == saved[0]
    if found is None:
        save_as(9, 2, directory, backend)  # no leftover of the dead is in the way
        assert whose(directory) == 9
    if lived == num_savers:
        left = [entry.name for entry in store_of(location_of(directory)).entries(location_of(directory))]
        assert not [name for name in left if name.startswith(IN_PROGRESS_FNAME)], left
    return len(saved), lived


@pytest.mark.parametrize("chunk", seeds(10, quick=1))
def test_a_checkpoint_is_whole_or_not_there_in_any_order_of_the_steps_of_its_savers(tmp_path: Path, chunk: int) -> None:
    told = [explore(str(tmp_path / str(seed)), seed) for seed in range(50 * chunk, 50 * chunk + 50)]
    assert sum(num_saved for num_saved, _ in told) > 10, "most of the trials end with a checkpoint"


@pytest.mark.parametrize("chunk", seeds(4, quick=1))
def test_the_same_holds_of_zarr_whose_cells_have_fixed_names(tmp_path: Path, chunk: int) -> None:
    told = [explore(str(tmp_path / str(seed)), seed, "zarr") for seed in range(50 * chunk, 50 * chunk + 50)]
    assert sum(num_saved for num_saved, _ in told) > 10, "most of the trials end with a checkpoint"


@pytest.mark.parametrize("backend", [BACKEND, "zarr"])
def test_the_same_holds_in_a_store_of_objects(backend: str) -> None:
    for seed in seeds(40, quick=10):
        explore(f"memory://turns/{backend}/{seed}", 1000 + seed, backend)


@pytest.mark.parametrize("backend", [BACKEND, "zarr"])
def test_a_look_that_the_commit_overtakes_finds_the_checkpoint_and_not_one_of_native_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    lock = write_as(5, 1, str(tmp_path), backend)
    read = LocalStore.read

    def read_and_wait(store: LocalStore, path: Path) -> bytes:
        if path.name == "metadata.json":
            monkeypatch.setattr(LocalStore, "read", read)
            assert not path.exists()
            finish(lock, CheckpointingConfig(backend))
            raise FileNotFoundError(path)
        return read(store, path)

    monkeypatch.setattr(LocalStore, "read", read_and_wait)
    assert load({}, tmp_path)["job"] == 5


def test_a_save_that_has_lost_its_turn_is_told_so_when_the_other_ends_in_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = begin(tmp_path)
    marks = [given_up.path, begin(tmp_path).path]
    look = LocalStore.size_of

    def look_while_the_other_ends(store: LocalStore, path: Path) -> int | None:
        found = look(store, path)
        for mark in marks:
            mark.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(LocalStore, "size_of", look_while_the_other_ends)
    with pytest.raises(CheckpointingException, match="another save has taken this directory over"), held(given_up):
        raise FileNotFoundError(given_up.staged("metadata.json"))


class Fails:
    """Lets the acts of a save on its store fail with an error of the disk, from the ``first`` on, ``count`` of them.

    Before they are done, or after: then they are done, and their answer is lost.
    """

    def __init__(self, first: int, count: float, *, after: bool) -> None:
        self.num_acts, self._first, self._count, self._after = 0, first, count, after

    def __enter__(self) -> Fails:
        self._patch = pytest.MonkeyPatch()
        for name in _ACTS:
            self._patch.setattr(LocalStore, name, self._failing(getattr(LocalStore, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _failing(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **kwargs: Any) -> Any:
            self.num_acts += 1
            if not self._first <= self.num_acts < self._first + self._count:
                return act(*args, **kwargs)
            if self._after and isinstance(done := act(*args, **kwargs), NewFile):
                done.close()
            raise OSError(5, "Input/output error")

        return acting


def save_form(form: str, place: Path) -> None:
    """A save with a marker, or as a strategy by itself ends one."""
    if form == BACKEND:
        save_as(1, 2, str(place))
        return
    lock = begin(place)
    _store_as_torch_dist([ShardedTensor.from_rank_offsets("w", torch.ones(5, 3))], lock)
    finish(lock, None)


def is_found(place: Path, form: str) -> bool:
    """Whether a reader has what `save_form` has saved."""
    if form == BACKEND:
        return whose(str(place)) == 1
    try:
        return bool(load({"w": torch.zeros(5, 3)}, place)["w"].eq(1).all())
    except CheckpointingException:
        return False


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("form", [BACKEND, "native"])
@pytest.mark.parametrize(
    ("num_before", "count"),
    [(0, 1), *(pytest.param(1, count, marks=pytest.mark.slow) for count in (1, 3)), (1, float("inf"))],
)
def test_a_save_says_saved_exactly_where_its_checkpoint_is_there_whatever_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, num_before: int, count: float, after: bool
) -> None:
    """And where it is not there yet and may still come, the error says so."""
    told = []
    commit = "metadata.json" if form == BACKEND else ".metadata"
    for first in itertools.count(1):
        place = tmp_path / str(first)
        for _ in range(num_before):
            begin(place)
        caplog.clear()
        try:
            with Fails(first, count, after=after) as fails:
                save_form(form, place)
            words = "saved"
        except (OSError, CheckpointingException) as raised:
            words = str(raised)
        is_there, left = (place / commit).exists(), [path.name for path in place.glob(f"{IN_PROGRESS_FNAME}*")]
        told.append("saved" if words == "saved" else "to be completed" if "may still" in words else "failed")
        is_unknown = count > 1 and told[-1] == "to be completed"  # a store that has stopped to answer
        assert is_there == (told[-1] == "saved") or is_unknown, words
        assert "another save" not in words, "nobody else was there"
        for name in left if told[-1] == "saved" else ():
            assert name in caplog.text, "what is left behind is named"
        assert is_found(place, form) == (told[-1] != "failed") or is_unknown, words
        if fails.num_acts < first:
            break
    assert {*told} == {"failed", "to be completed", "saved"}, told
    assert told[-4:] == ["saved"] * 4, "some fail after the commit"
