"""The loops that people write, hurt wherever they communicate: they end as if nothing had happened.

The oracle is the same program, run calmly. One rank plays the job: it loses a peer in a collective of the program's, is
called again with what it held, and goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.optim import lr_scheduler

from remesh.checkpoint.storage import location_of
from remesh.elasticity.model.generation import Generation
from remesh.elasticity.model.rank_assignment import MeshMember
from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.training.job import Job
from remesh.elasticity.training.place import JobOptions, Leave, RankPlace
from remesh.elasticity.training.sample_stream import Stream
from remesh.elasticity.training.session import TrainingSession
from remesh.elasticity.training_state import HeldState
from remesh.foundation.errors import ConfigError, PeerError
from remesh.groups.lower import LowerHalf


class Taker:
    is_busy = False


class Around:
    """The worker around a job; it is asked to leave at the commits that the test says."""

    is_leaving = is_broken = False

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def wants_pause(self) -> bool:
        return self._world.meets()

    def note_step(self) -> None:
        pass

    def rejoin(self, error: BaseException | None) -> None:
        return None


@dataclass
class World:
    """What outlives the generations of a job, and where they end."""

    hurt: frozenset[int] = frozenset()
    """Numbers of the collectives in which a peer is lost."""
    count: int = 0
    taken: list[tuple[str, list[int]]] = field(default_factory=list)
    """What was read, and the samples of each batch that was taken."""
    evaluated: list[Any] = field(default_factory=list)

    def meets(self) -> bool:
        self.count += 1
        return self.count in self.hurt

    def collective(self) -> None:
        """The program communicates."""
        if self.meets():
            raise PeerError("a rank was lost")


@contextlib.contextmanager
def stint_of(
    world: World, held: HeldState | None, number: int, folder: Path | None = None, seed: int = 3, **options: Any
) -> Iterator[TrainingSession]:
    lower = LowerHalf("gloo", "cpu", 30.0)
    lower.pretend(0, {"dp": 1})
    plan = Generation(number, {"dp": 1}, (MeshMember(0, 0, 0, 1),), (), {0: "a"}, 0, True, "1 worker fits dp=1")
    place = RankPlace(plan, 0, lower, Taker())  # type: ignore[arg-type]
    wanted = JobOptions(seed=seed, checkpoint=folder and location_of(folder), save_every=None, **options)
    try:
        yield TrainingSession(place, held, caller=Around(world), options=wanted, log=EventLog(None, "test"))  # type: ignore[arg-type]
    finally:
        lower.shed()


class Net:
    """A model with an optimizer and a scheduler, all carried, and a counter that no scheduler is."""

    def __init__(self, job: Job, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = lr_scheduler.MultiStepLR(self.optim, [1, 2], 0.5)
        self.seen = {"epochs": 0, "best": None}
        job.carry(model=self.model, optim=self.optim, scheduler=self.scheduler, seen=self, **more)

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.model(batch.float()[:, None] / 10) - 1).square().mean()


Program = Callable[[Job, World], Any]


def step(job: Job, world: World, net: Net, what: str, batch: torch.Tensor) -> bool:
    world.collective()  # gradients
    net.loss(batch).backward()
    ok = job.commit()
    if ok:
        net.optim.step()
        world.taken.append((what, batch.tolist()))
    net.optim.zero_grad()
    return ok


def evaluate(world: World, net: Net) -> float:
    world.collective()
    with torch.no_grad():
        return float(net.loss(torch.arange(4)))


A, B = range(10), range(100, 107)


def epochs_inside(job: Job, world: World) -> Net:
    net = Net(job)
    for batch in job.batches(A, 4, epochs=3):
        step(job, world, net, "A", batch)
    return net


def evaluation_after_each_step(job: Job, world: World) -> Net:
    net = Net(job)
    for batch in job.batches(A, 4, epochs=3):
        step(job, world, net, "A", batch)
        evaluate(world, net)
    return net


def evaluation_before_each_step(job: Job, world: World) -> Net:
    net = Net(job)
    for batch in job.batches(A, 4, epochs=3):
        evaluate(world, net)
        net.seen = {**net.seen, "epochs": net.seen["epochs"] + 1}
        step(job, world, net, "A", batch)
    assert net.seen["epochs"] == 8
    return net


def epochs_with_a_scheduler(job: Job, world: World) -> Net:
    net = Net(job)
    for epoch in job.epochs(4):
        for batch in job.batches(A, 4, epochs=1):
            step(job, world, net, "A", batch)
        value = evaluate(world, net)
        net.scheduler.step()
        net.seen = {"epochs": net.seen["epochs"] + 1, "best": (epoch, value)}
        world.collective()  # a barrier behind what has changed
    assert net.seen["epochs"] == 4
    return net


def epochs_that_stop_early(job: Job, world: World) -> Net:
    net = Net(job)
    for _ in job.epochs(9):
        if net.seen["epochs"] == 3:
            break
        for batch in job.batches(A, 4, epochs=1):
            step(job, world, net, "A", batch)
        evaluate(world, net)
        net.seen = {**net.seen, "epochs": net.seen["epochs"] + 1}
    return net


def plain_epochs(job: Job, world: World) -> Net:
    net = Net(job)
    for _ in range(4):
        for batch in job.batches(A, 4, epochs=1):
            step(job, world, net, "A", batch)
        evaluate(world, net)
        net.scheduler.step()
        world.collective()
    return net


def two_phases(job: Job, world: World) -> Net:
    net = Net(job)
    for batch in job.batches(A, 4, max_steps=4):
        step(job, world, net, "A", batch)
    evaluate(world, net)
    for group in net.optim.param_groups:
        group["lr"] = 0.01
    for batch in job.batches(B, 2, epochs=2):
        step(job, world, net, "B", batch)
    return net


def datasets_in_turn(job: Job, world: World) -> Net:
    net = Net(job)
    one, other = job.batches(A, 4, epochs=2), job.batches(B, 3, epochs=2)
    while job.step < 6:
        what, batches = ("A", one) if job.step % 2 == 0 else ("B", other)
        step(job, world, net, what, next(batches))
    return net


def warm_up_epochs_and_a_tail(job: Job, world: World) -> Net:
    net = Net(job)
    for batch in job.batches(B, 3, max_steps=2):
        step(job, world, net, "B", batch)
    for _ in job.epochs(2):
        for batch in job.batches(A, 5, epochs=1):
            step(job, world, net, "A", batch)
        for batch in job.batches(B, 4, max_steps=1):
            step(job, world, net, "B", batch)
        evaluate(world, net)
        net.scheduler.step()
    for batch in job.batches(A, 4, max_steps=2):
        step(job, world, net, "A", batch)
    return net


def streams_by_epoch(job: Job, world: World) -> Net:
    stream = Stream(torch.utils.data.DataLoader(A, batch_size=None, shuffle=True))
    net = Net(job, data=stream)
    for _ in job.epochs(3):
        for batch in job.batches(stream, 4, epochs=1):
            step(job, world, net, "A", batch)
        evaluate(world, net)
        net.scheduler.step()
    return net


def streams_that_are_not_carried(job: Job, world: World) -> Net:
    net = Net(job)
    stream, other = Stream(list(A)), Stream(list(B))
    for _ in range(2):
        for batch in job.batches(stream, 4, epochs=1):
            step(job, world, net, "A", batch)
        for batch in job.batches(other, 4, max_steps=1):
            step(job, world, net, "B", batch)
    return net


def accumulation_with_evaluation(job: Job, world: World) -> Net:
    net = Net(job)
    for batch in job.batches(A, 2, epochs=3):
        world.collective()
        net.loss(batch).backward()
        if job.commit():
            world.taken.append(("A", batch.tolist()))
            if job.step % 2 == 0:
                net.optim.step()
                net.optim.zero_grad()
        if job.step > 2:  # it is known by then how often the program steps
            evaluate(world, net)
    return net


def two_optimizers(job: Job, world: World) -> Net:
    torch.manual_seed(1)
    critic = nn.Linear(1, 1)
    slow = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    net = Net(job, critic=critic, slow=slow)
    for batch in job.batches(A, 2, epochs=3):
        world.collective()
        net.loss(batch).backward()
        is_due = (job.step + 1) % 3 == 0
        if is_due:
            critic(batch.float()[:, None] / 10).square().mean().backward()
        if job.commit():
            world.taken.append(("A", batch.tolist()))
            net.optim.step()
            if is_due:
                slow.step()
        net.optim.zero_grad()
        slow.zero_grad()
        if job.step > 3:
            evaluate(world, net)
    net.model.weight.data += critic.weight.data  # so that it is compared
    return net


class Unlucky(Exception):
    """What a program makes of an error of the network."""


def loops_left_by_break(job: Job, world: World) -> Net:
    """What decides is a variable of this call, which the next one begins anew."""
    net = Net(job)
    for _ in range(3):
        num_taken = 0
        for batch in job.batches(A, 4, epochs=3):
            num_taken += step(job, world, net, "A", batch)
            if num_taken:
                break
        evaluate(world, net)
    return net


def numbered(batches: Iterator[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """A generator of the program's around ours, as progress bars are."""
    for number, batch in enumerate(batches):  # noqa: UP028 - it stays a loop
        yield number, batch


def wrapped_loops_left_by_break(job: Job, world: World) -> Net:
    net = Net(job)
    for _ in range(2):
        for number, batch in numbered(job.batches(A, 3, epochs=2)):
            step(job, world, net, "A", batch)
            if number == 0:
                break
        evaluate(world, net)
    return net


def loops_whose_errors_are_renamed(job: Job, world: World) -> Net:
    net = Net(job)
    for _ in range(2):
        try:
            for batch in job.batches(A, 4, max_steps=2):
                step(job, world, net, "A", batch)
                evaluate(world, net)
        except PeerError as error:
            raise Unlucky from error
    return net


def epochs_and_batches_left_by_break(job: Job, world: World) -> Net:
    net = Net(job)
    for epoch in job.epochs(5):
        for batch in job.batches(A, 4, epochs=1):
            step(job, world, net, "A", batch)
            if batch.sum() > 0:
                break
        value = evaluate(world, net)
        net.scheduler.step()
        net.seen = {"epochs": net.seen["epochs"] + 1, "best": (epoch, value)}
        if net.seen["epochs"] == 3:
            break
    for batch in job.batches(B, 3, max_steps=2):
        step(job, world, net, "B", batch)
        evaluate(world, net)
    return net


def causal_language_model_without_a_trainer(job: Job, world: World) -> Net:
    """The loop of run_clm_no_trainer: accumulation, a scheduler of steps, a perplexity each epoch, early stop."""
    net = Net(job)
    for epoch in job.epochs(6):
        for batch in job.batches(A, 2, epochs=1):
            world.collective()
            (net.loss(batch) / 2).backward()
            if job.commit():
                world.taken.append(("A", batch.tolist()))
                if job.step % 2 == 0 or job.step % 5 == 0:  # the last of an epoch steps, too
                    net.optim.step()
                    net.scheduler.step()
                    net.optim.zero_grad()
        perplexity = evaluate(world, net)
        best = net.seen["best"]
        if best is not None and (perplexity >= best[1] or epoch - best[0] >= 2):
            break
        net.seen = {"epochs": net.seen["epochs"] + 1, "best": best if epoch % 2 else (epoch, perplexity)}
    evaluate(world, net)
    return net


def images_with_an_average_of_weights(job: Job, world: World) -> Net:
    """The loop of timm: mixup, an average of the weights, evaluation of both and a scheduler each epoch."""
    torch.manual_seed(2)
    average = torch.optim.swa_utils.AveragedModel(
        nn.Linear(1, 1), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    net = Net(job, average=average)
    for _ in job.epochs(3):
        for batch in job.batches(A, 4, epochs=1):
            share = np.random.beta(0.8, 0.8)
            mixed = share * batch.float() + (1 - share) * batch.flip(0).float()
            world.collective()
            net.loss(mixed).backward()
            if job.commit():
                net.optim.step()
                average.update_parameters(net.model)
                world.taken.append(("A", batch.tolist()))
            net.optim.zero_grad()
        with torch.no_grad():
            value = float(average(torch.ones(1, 1)))
        evaluate(world, net)
        net.scheduler.step()
        net.seen = {"epochs": net.seen["epochs"] + 1, "best": value}
        world.collective()
    net.model.load_state_dict(average.module.state_dict())  # so that it is compared
    return net


PROGRAMS: list[Program] = [
    epochs_inside,
    evaluation_after_each_step,
    evaluation_before_each_step,
    epochs_with_a_scheduler,
    epochs_that_stop_early,
    plain_epochs,
    two_phases,
    datasets_in_turn,
    warm_up_epochs_and_a_tail,
    streams_by_epoch,
    streams_that_are_not_carried,
    accumulation_with_evaluation,
    two_optimizers,
    loops_left_by_break,
    wrapped_loops_left_by_break,
    loops_whose_errors_are_renamed,
    epochs_and_batches_left_by_break,
    causal_language_model_without_a_trainer,
    images_with_an_average_of_weights,
]


def run(program: Program, hurt: Sequence[int] = ()) -> tuple[World, dict[str, Any]]:
    """The world and what the program ends with, after losses of peers in these collectives."""
    world, held = World(frozenset(hurt)), None
    for number in range(1, len(hurt) + 2):
        with stint_of(world, held, number) as session:
            torch.manual_seed(random.Random(number).randrange(1000))
            try:
                net = program(Job(session, EventLog(None, "test")), world)
                session.finish()
            except (Leave, PeerError, Unlucky) as error:
                held = session.hold(error)
                assert held is not None, f"nobody holds state after collective {world.count} of {program.__name__}"
                continue
            weights = {name: one.tolist() for name, one in net.model.state_dict().items()}
            return world, {"weights": weights, "rate": net.optim.param_groups[0]["lr"], "seen": net.seen["epochs"]}
    raise AssertionError("the program did not end")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_loop_that_loses_a_peer_anywhere_ends_as_if_nothing_had_happened(program: Program) -> None:
    calm, ends = run(program)
    # A batch whose outcome is not told to the program is taken all the same, at the end of what it tells.
    for hurt in range(1, calm.count + 1):
        world, found = run(program, [hurt])
        assert world.taken == calm.taken, f"lost a peer in collective {hurt}"
        assert found == ends, f"lost a peer in collective {hurt}"


@settings(max_examples=15)
@given(st.sampled_from(PROGRAMS), st.sets(st.integers(1, 40), min_size=2, max_size=3))
def test_a_loop_that_loses_peers_again_and_again_ends_as_if_nothing_had_happened(
    program: Program, hurt: set[int]
) -> None:
    calm, ends = run(program)
    world, found = run(program, sorted(hurt))
    assert (world.taken, found) == (calm.taken, ends)


def test_all_of_a_dataset_is_read_once_an_epoch_however_the_loop_is_written() -> None:
    for program, num_epochs in ((epochs_inside, 3), (epochs_with_a_scheduler, 4), (plain_epochs, 4)):
        world, _ = run(program)
        samples = [sample for _, batch in world.taken for sample in batch]
        assert sorted(samples) == sorted([*A] * num_epochs)
        orders = {tuple(samples[start : start + len(A)]) for start in range(0, len(samples), len(A))}
        assert len(orders) == num_epochs, "epochs have one order"
    world, _ = run(two_phases)
    assert [what for what, _ in world.taken] == ["A"] * 4 + ["B"] * 7


# --- what is refused ---


def train_and_hold(program: Program, hurt: int) -> tuple[World, HeldState]:
    world = World(frozenset([hurt]))
    with stint_of(world, None, 1) as session:
        with pytest.raises((Leave, PeerError)):
            program(Job(session, EventLog(None, "test")), world)
        held = session.hold()
    assert held is not None
    return world, held


def other_dataset(job: Job, world: World) -> Net:
    net = Net(job)
    for batch in job.batches(range(20), 4, epochs=3):
        step(job, world, net, "other", batch)
    return net


def test_a_job_that_goes_on_with_another_dataset_is_refused_by_name() -> None:
    world, held = train_and_hold(epochs_inside, 6)
    with (
        stint_of(world, held, 2) as session,
        pytest.raises(ConfigError, match="length is 20, expected 10; samples would"),
    ):
        other_dataset(Job(session, EventLog(None, "test")), world)


def saved(folder: Path, program: Program, hurt: int) -> None:
    """A checkpoint of a job that was ended there."""
    world = World(frozenset([hurt]))
    with stint_of(world, None, 1, folder) as session:
        job = Job(session, EventLog(None, "test"))
        with pytest.raises((Leave, PeerError)):
            program(job, world)
        job.save()


def reading(dataset: Any) -> Program:
    def program(job: Job, world: World) -> Net:
        net = Net(job)
        for batch in job.batches(dataset, 4, epochs=3):
            step(job, world, net, "A", batch)
        return net

    return program


@pytest.mark.parametrize(
    ("dataset", "seed", "words"),
    [(range(20), 3, "length is 20, expected 10"), (A, 4, "seed is 4, expected 3"), (range(1, 11), 3, "digest is")],
)
def test_a_job_that_is_resumed_with_other_data_is_refused_unless_asked_for(
    tmp_path: Path, dataset: Any, seed: int, words: str
) -> None:
    saved(tmp_path, epochs_inside, 7)
    world = World()
    with stint_of(world, None, 1, tmp_path, seed=seed) as session, pytest.raises(ConfigError, match=words):
        reading(dataset)(Job(session, EventLog(None, "test")), world)
    assert not world.taken
    with stint_of(world, None, 1, tmp_path, seed=seed, changed_data="begin") as session:
        reading(dataset)(Job(session, EventLog(None, "test")), world)
    samples = [sample for _, batch in world.taken for sample in batch]
    assert sorted(samples) == sorted([*dataset] * 3), "the new one from its beginning"
    world = World()
    with stint_of(world, None, 1, tmp_path, seed=seed, changed_data="continue") as session:
        reading(dataset)(Job(session, EventLog(None, "test")), world)
    assert len([sample for _, batch in world.taken for sample in batch]) == 3 * len(dataset) - 12


def limited(**limits: int) -> Program:
    def program(job: Job, world: World) -> Net:
        net = Net(job)
        for batch in job.batches(B, 3, max_steps=2):
            step(job, world, net, "B", batch)
        for batch in job.batches(A, 4, **limits):
            step(job, world, net, "A", batch)
        return net

    return program


@pytest.mark.parametrize(
    ("before", "after"), [({"max_steps": 2}, {"max_steps": 7}), ({"epochs": 1}, {"epochs": 3}), ({"epochs": 2},) * 2]
)
def test_a_job_that_has_ended_and_is_started_again_with_more_to_do_does_it(
    tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    """And no more than that: the loop before the last one is over, with the same limits the last one, too."""
    whole, world = World(), World()
    with stint_of(whole, None, 1) as session:
        limited(**after)(Job(session, EventLog(None, "test")), whole)
    for limits in (before, after):
        with stint_of(world, None, 1, tmp_path) as session:
            job = Job(session, EventLog(None, "test"))
            limited(**limits)(job, world)
            job.save()
    # The last batch of an end may be a short one; the samples are the same.
    assert samples_of(world) == samples_of(whole)


def samples_of(world: World) -> list[tuple[str, int]]:
    return [(what, sample) for what, batch in world.taken for sample in batch]


class Chances(torch.utils.data.Dataset[torch.Tensor]):
    """Changes its samples at random, by each generator that programs use, and one that nobody seeds."""

    def __init__(self, strange: bool = False) -> None:
        self._numbers = itertools.count() if strange else itertools.repeat(0)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        own = next(self._numbers)
        return torch.tensor(index + random.random() + float(np.random.rand()) + float(torch.rand(())) + own)


@pytest.mark.parametrize("strange", [False, True])
def test_data_that_is_changed_at_random_is_known_again(tmp_path: Path, strange: bool) -> None:
    def program(job: Job, world: World) -> Net:
        return reading(Chances(strange))(job, world)

    saved(tmp_path, program, 7)
    world = World()
    with stint_of(world, None, 1, tmp_path) as session:
        program(Job(session, EventLog(None, "test")), world)
    assert len(world.taken) == 5
    if not strange:
        calm, _ = run(program)
        assert world.taken == calm.taken[3:], "chance follows from the step: torch's, Python's and NumPy's"


def test_a_program_that_writes_into_tensors_on_its_way_is_refused_by_name() -> None:
    """It makes its layer anew between two phases: on the next mesh that would be done to the trained one."""

    def with_a_new_layer(job: Job, world: World) -> Net:
        net = Net(job)
        for batch in job.batches(A, 4, max_steps=3):
            step(job, world, net, "A", batch)
        net.model.reset_parameters()
        for batch in job.batches(B, 4, max_steps=3):
            step(job, world, net, "B", batch)
        return net

    calm, _ = run(with_a_new_layer)
    with pytest.raises(ConfigError, match=r"written to 'model.weight' on its way to where the job stands, at step"):
        run(with_a_new_layer, [calm.count - 1])


def test_two_loops_of_epochs_are_refused_and_so_are_two_batches_at_once() -> None:
    def twice(job: Job, world: World) -> None:
        Net(job)
        for _ in range(2):
            for _ in job.epochs(1):
                pass

    def at_once(job: Job, world: World) -> None:
        Net(job)
        for _ in zip(job.batches(A, 4), job.batches(B, 4), strict=False):
            job.commit()

    with pytest.raises(ConfigError, match="a job has one number of epochs"):
        run(twice)
    with pytest.raises(ConfigError, match="neither committed nor dropped"):
        run(at_once)


def test_a_program_that_a_loss_hits_inside_of_an_optimizer_step_holds_nothing() -> None:
    """Its optimizer communicates: some parameters have moved, others not."""

    class Talking(torch.optim.SGD):
        world: World

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step()
            self.world.collective()

    def program(job: Job, world: World) -> None:
        model = nn.Linear(1, 1)
        optim = Talking(model.parameters(), lr=0.1)
        optim.world = World()
        job.carry(model=model, optim=optim)
        optim.world = world
        for batch in job.batches(A, 4, epochs=3):
            model(batch.float()[:, None]).sum().backward()
            job.commit()
            optim.step()

    world = World(frozenset([6]))
    with stint_of(world, None, 1) as session:
        with pytest.raises(PeerError):
            program(Job(session, EventLog(None, "test")), world)
        assert session.hold() is None
