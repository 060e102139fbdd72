"""The face of a job over the stint of a single rank: what a program sees, and what the worker keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.storage import location_of
from remesh.comm.gather import Together
from remesh.elasticity.model.generation import Generation
from remesh.elasticity.model.rank_assignment import MeshMember
from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.training import fill as training_fill, session as training_session
from remesh.elasticity.training.job import Job
from remesh.elasticity.training.place import JobOptions, Leave, RankPlace
from remesh.elasticity.training.sample_stream import Stream
from remesh.elasticity.training.session import TrainingSession
from remesh.elasticity.training.window_fill import report_lack_of_memory
from remesh.elasticity.training_state import CarriedState, HeldState
from remesh.foundation.errors import ConfigError, PeerError
from remesh.foundation.options import OptionError
from remesh.groups.lower import LowerHalf
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece


class Taker:
    is_busy = False


class Around:
    """The worker around a job, which wants what the test says."""

    wants_pause = is_leaving = is_broken = False
    num_steps = 0

    def note_step(self) -> None:
        self.num_steps += 1

    def rejoin(self, error: BaseException | None) -> None:
        return None


@pytest.fixture
def around() -> Around:
    return Around()


@pytest.fixture
def session(around: Around) -> Iterator[TrainingSession]:
    with stint_of(around) as found:
        yield found


@contextlib.contextmanager
def stint_of(
    around: Around, held: HeldState | None = None, *, in_place: bool = False, checkpoint: Path | None = None
) -> Iterator[TrainingSession]:
    lower = LowerHalf("gloo", "cpu", 30.0)
    lower.pretend(0, {"dp": 1})
    members, words = (MeshMember(0, 0, 0, 1),), "1 worker fits dp=1"
    plan = Generation(1, {"dp": 1}, members, (), {0: "a"}, 0, True, words, in_place=in_place)
    place = RankPlace(plan, 0, lower, Taker())  # type: ignore[arg-type]
    options = JobOptions(seed=0, checkpoint=checkpoint and location_of(checkpoint), save_every=None)
    try:
        yield TrainingSession(place, held, caller=around, options=options, log=EventLog(None, "test"))  # type: ignore[arg-type]
    finally:
        lower.shed()


def test_a_job_shows_where_it_stands_and_takes_its_steps(session: TrainingSession, around: Around) -> None:
    job, weight = Job(session, EventLog(None, "test")), torch.zeros(3)
    assert (job.rank, job.world_size, job.generation, job.reason) == (0, 1, 1, "1 worker fits dp=1")
    job.carry(weight=weight)
    seen = []
    for batch in job.batches(range(10), 4, epochs=1):
        seen += batch.tolist()
        assert job.batch_weight == 1.0
        weight += 1
        assert job.commit() is True
    assert sorted(seen) == list(range(10)) and (job.step, job.samples, around.num_steps) == (3, 10, 3)
    session.finish()
    held = session.hold()
    assert held is not None and held.step == 3 and held.pieces["weight"].tensor is not None


def test_a_pause_ends_the_stint_between_two_steps_and_the_state_is_kept(
    session: TrainingSession, around: Around
) -> None:
    job = Job(session, EventLog(None, "test"))
    job.carry(weight=torch.zeros(3))
    batches = job.batches(range(10), 4)
    next(batches)
    around.wants_pause = True
    assert job.commit(ok=False) is False and not session.last_taken
    with pytest.raises(Leave):
        next(batches)
    held = session.hold()
    assert held is not None and held.step == 1


def test_a_state_in_the_middle_of_a_step_is_not_kept(session: TrainingSession) -> None:
    job = Job(session, EventLog(None, "test"))
    job.carry(weight=torch.zeros(3))
    next(job.batches(range(10), 4))
    assert job.commit()
    assert session.hold() is None


def test_a_step_whose_gradients_may_not_have_arrived_is_not_voted_on(session: TrainingSession, around: Around) -> None:
    job = Job(session, EventLog(None, "test"))
    job.carry(weight=torch.zeros(3))
    next(job.batches(range(10), 4))

    def given_up() -> None:
        raise PeerError("a collective on the device was given up")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session._lower, "check_end", given_up)
        with pytest.raises(PeerError):
            job.commit()
    assert (job.step, around.num_steps) == (0, 0)
    held = session.hold()
    assert held is not None and held.step == 0, "the state before the step stands"


def test_what_others_may_have_given_up_is_kept_when_a_rank_is_lost_while_all_are_filled(
    session: TrainingSession,
) -> None:
    kept = HeldState(7, 70, {}, {})

    def lose_a_peer(state: CarriedState, *more: object) -> None:
        state.in_doubt = kept
        raise PeerError("a rank was lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_session, "fill_state", lose_a_peer)
        with pytest.raises(PeerError):
            Job(session, EventLog(None, "test")).carry(weight=torch.zeros(3))
    assert session.hold() is kept


def test_calls_out_of_order_are_refused(session: TrainingSession) -> None:
    job = Job(session, EventLog(None, "test"))
    with pytest.raises(ConfigError, match=r"call job\.carry"):
        next(job.batches(range(10), 4))
    with pytest.raises(ConfigError, match="no batch has been taken"):
        job.commit()
    with pytest.raises(ConfigError, match="job needs a folder"):
        job.save()
    job.carry(weight=torch.zeros(3))
    with pytest.raises(ConfigError, match="already carries"):
        job.carry(weight=torch.zeros(3))
    next(job.batches(range(10), 4))
    with pytest.raises(ConfigError, match="neither committed nor dropped"):
        session.finish()


def test_a_loop_that_never_commits_does_not_get_its_first_batch_for_ever(session: TrainingSession) -> None:
    job = Job(session, EventLog(None, "test"))
    job.carry(weight=torch.zeros(3))
    batches = job.batches(range(10), 4)
    next(batches)
    with pytest.raises(ConfigError, match="the same one again: .* neither committed nor dropped"):
        next(batches)


def vote_after(
    monkeypatch: pytest.MonkeyPatch, session: TrainingSession, other: dict[str, Any] | None, **given: Any
) -> Any:
    """One step with these arguments beside a rank that told ``other``; what this rank tells."""
    told: dict[str, Any] = {}

    def all_reduce(vote: torch.Tensor, *_: Any, **__: Any) -> None:
        told["vote"] = vote.clone()
        if other is not None:
            torch.maximum(vote, other["vote"], out=vote)

    def all_gather_json(value: Any, _: Any) -> list[Any]:
        return [value if other is None else other["cut"], value]

    monkeypatch.setattr(training_session.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(training_session, "all_gather_json", all_gather_json)
    job = Job(session, EventLog(None, "test"))
    if session._state is None:
        job.carry(weight=torch.zeros(3))
    arguments = {"dataset": range(12), "batch_size": 4, "epochs": 2, "max_steps": 3, **given}
    next(job.batches(**arguments), None)
    told["cut"] = None if session._batch is None else session._batch.cut
    job.commit()
    return told


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "batch_size": ({"batch_size": 6}, "batch_size is 4 on rank 0 and 6 on rank 1"),
    "epochs": ({"epochs": 1}, "epochs is 2 on rank 0 and 1 on rank 1"),
    "max_steps": ({"max_steps": None}, "max_steps is 3 on rank 0 and None on rank 1"),
    "data_axes": ({"data_axes": ()}, r"data_axes is \['dp'\] on rank 0 and \[\] on rank 1"),
    "the dataset's length": ({"dataset": range(8)}, r"len\(dataset\) is 12 on rank 0 and 8 on rank 1"),
    "a stream": ({"dataset": Stream(range(12))}, r"len\(dataset\) is 12 on rank 0 and that of a stream on rank 1"),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_ranks_that_cut_batches_by_other_arguments_are_refused_before_the_first_step(
    session: TrainingSession, monkeypatch: pytest.MonkeyPatch, unlike: str
) -> None:
    given, words = UNLIKE[unlike]
    other = vote_after(monkeypatch, session, None)
    assert vote_after(monkeypatch, session, other)["cut"] == other["cut"], "the same arguments are no error"
    with pytest.raises(ConfigError, match=words):
        vote_after(monkeypatch, session, other, **given)
    assert session.position.step == 2


ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "max_steps": ({"max_steps": 0}, "max_steps is 3 on rank 0 and 0 on rank 1"),
    "epochs": ({"epochs": 0}, "epochs is 2 on rank 0 and 0 on rank 1"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_whose_batches_end_before_its_first_step_is_told_of_the_others(
    around: Around, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    given, words = ENDS[end]
    with stint_of(around) as other:
        told = vote_after(monkeypatch, other, None)
    with stint_of(around) as ended, pytest.raises(ConfigError, match=words):
        vote_after(monkeypatch, ended, told, **given)


def test_a_rank_whose_stream_is_shorter_is_told_of_the_others(around: Around, monkeypatch: pytest.MonkeyPatch) -> None:
    with stint_of(around) as other:
        longer = Stream(range(8))
        vote_after(monkeypatch, other, None, dataset=longer, epochs=1)
        told = vote_after(monkeypatch, other, None, dataset=longer, epochs=1)
    with stint_of(around) as ended:
        shorter = Stream(range(4))
        vote_after(monkeypatch, ended, None, dataset=shorter, epochs=1)
        with pytest.raises(ConfigError, match=r"did not read the same samples .*; rank 0 read range \(digest"):
            vote_after(monkeypatch, ended, told, dataset=shorter, epochs=1)


def test_ranks_that_come_to_the_end_together_are_content(
    session: TrainingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, told = Job(session, EventLog(None, "test")), []
    monkeypatch.setattr(training_session.dist, "all_reduce", lambda vote, *_, **__: told.append(vote.tolist()))
    assert not [*job.batches(range(12), 4, max_steps=0)] and not told, "nothing is carried yet, and nobody asked"
    job.carry(weight=torch.zeros(3))
    assert not [*job.batches(range(12), 4, max_steps=0)] and len(told) == 1
    for _ in job.batches(range(12), 4, max_steps=2):
        job.commit()
    assert len(told) == 3, "in votes they have compared what makes them end"
    for _ in job.batches(Stream(range(12)), 4, epochs=1):
        job.commit()
    assert len(told) == 7, "a stream ends where it ends"


def test_a_rank_that_takes_anothers_place_passes_over_what_lies_behind_it_alone(
    around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stayed are in a later loop: they would hear of an end that is none of theirs."""
    monkeypatch.setattr(training_session.dist, "all_reduce", lambda *_, **__: pytest.fail("told the others"))
    with stint_of(around, in_place=True) as session:
        job = Job(session, EventLog(None, "test"))
        job.carry(weight=torch.zeros(3))
        assert not [*job.batches(range(12), 4, max_steps=0)]


WRONG_BATCHES: list[tuple[str, dict[str, Any]]] = [
    ("batch_size", {"batch_size": 4.0}),
    ("batch_size", {"batch_size": True}),
    ("epochs", {"epochs": 1.5}),
    ("max_steps", {"max_steps": "3"}),
    ("data_axes", {"data_axes": "dp"}),
]


@pytest.mark.parametrize(("name", "given"), WRONG_BATCHES)
def test_arguments_of_batches_of_the_wrong_type_are_refused(
    session: TrainingSession, name: str, given: dict[str, Any]
) -> None:
    job = Job(session, EventLog(None, "test"))
    job.carry(weight=torch.zeros(3))
    arguments: dict[str, Any] = {"batch_size": 4, **given}
    with pytest.raises(OptionError, match=f"asking for batches: option '{name}' is .*expected"):
        next(job.batches(range(12), **arguments))


def test_a_state_is_given_up_only_once_a_checkpoint_is_read_into_it(around: Around, tmp_path: Path) -> None:
    """Half of a tensor is held, nobody has the other half, and the checkpoint is of no use."""
    half = Piece(torch.ones(2), (4,), (Shard(0, Box((0,), (2,))),))
    held = HeldState(5, 50, {"weight": half}, {})
    job = {"values": {}, "position": {"step": 3, "samples": 30}}

    def fails_with(words: str) -> HeldState | None:
        with stint_of(around, held, checkpoint=tmp_path) as session:
            with pytest.raises(CheckpointingException, match=words):
                Job(session, EventLog(None, "test")).carry(weight=torch.zeros(4))
            return session.hold()

    remesh.save({"weight": torch.ones(7), "job": job}, tmp_path / step_name(3))
    assert fails_with("shape") is held
    remesh.save({"weight": torch.ones(4), "job": job}, tmp_path / step_name(4))
    damage(tmp_path / step_name(4))
    assert fails_with("checksum") is None, "its tensors may hold some of either"


def damage(checkpoint: Path) -> None:
    """Change the last byte of the only tensor."""
    [path] = checkpoint.glob("*.distcp")
    content = bytearray(path.read_bytes())
    at = content.rindex(torch.ones(4).numpy().tobytes())
    content[at + 15] ^= 1
    path.write_bytes(content)


def test_a_lack_of_memory_is_told_whatever_the_allocator_says() -> None:
    for raised in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nMore.")):
        told = report_lack_of_memory("filling", raised)
        words = str(raised).partition("\n")[0] or "MemoryError"
        assert isinstance(told, ConfigError) and f"no memory left for its part of the state ({words})" in str(told)


def test_ranks_that_carry_other_objects_are_refused(session: TrainingSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(*others: dict[str, str]) -> Any:
        def step_together(step: Any, *_: Any, tell: Any, **__: Any) -> Together[Any]:
            mine = step()
            told = tell(mine)
            return Together(mine, [told | {"carries": other} for other in others] + [told])

        return step_together

    model = torch.nn.Linear(2, 2)
    for carries, words in (
        ({"window_bytes": None, "'model'": "a module", "'optim'": "an optimizer"}, "'optim' is an optimizer on rank 0"),
        ({"window_bytes": None}, "'model' is missing on rank 0 and a module on rank 1"),
        ({"window_bytes": None, "'model'": "a tensor"}, "'model' is a tensor on rank 0 and a module on rank 1"),
        ({"window_bytes": 7, "'model'": "a module"}, "window_bytes is 7 on rank 0 and None on rank 1"),
    ):
        monkeypatch.setattr(training_fill, "step_together", beside(carries))
        with pytest.raises(ConfigError, match=words):
            Job(session, EventLog(None, "test")).carry(model=model)
