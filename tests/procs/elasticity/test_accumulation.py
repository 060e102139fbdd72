"""Gradients that are added up over several commits outlive the mesh, or the job says at once that they cannot."""

from pathlib import Path

import pytest
import torch

from remesh.elasticity.training.job import seed_everything
from remesh.elasticity.training.position import Position, derive_seed, plan_batch
from remesh.foundation.exit_codes import ExitCode
from remesh.testbed.samples import count_samples
from tests.procs.forked_job import ForkedJob
from tests.procs.scripts import tiny
from tests.support.hold import Hold

pytestmark = pytest.mark.procs
SCRIPT = str(Path(tiny.__file__))
QUIET_S = 90.0
EVERY, STEPS, MANY_STEPS = 5, 40, 100


def script(*flags: str, steps: int = STEPS) -> list[str]:
    return [SCRIPT, "--mesh", "dp=-1", "--steps", str(steps), "--accumulate", str(EVERY), "--full-size", "2", *flags]


@pytest.fixture(scope="module")
def of_one_process() -> dict[int, float]:
    return checksums_of_one_process(EVERY, MANY_STEPS)


def checksums_of_one_process(every: int, num_steps: int, other: int | None = None) -> dict[int, float]:
    """Commit -> checksum of the weights, by plain torch in this process; ``other`` is the last layer's period."""
    seed_everything(derive_seed(tiny.SEED))
    shape = {"dtype": torch.float64}
    width = tiny.WIDTH
    layers = torch.nn.Linear(width, 4 * width, **shape), torch.nn.Tanh(), torch.nn.Linear(4 * width, width, **shape)
    model = torch.nn.Sequential(*layers)
    optims = [(every, torch.optim.AdamW((model if other is None else model[0]).parameters(), lr=1e-2))]
    if other is not None:
        optims.append((other, torch.optim.AdamW(model[2].parameters(), lr=1e-2)))
    position, found = Position(), {}
    for step in range(1, num_steps + 1):
        size, count = tiny.BATCH_SIZE, tiny.NUM_SAMPLES
        batch = plan_batch(position, num_samples=count, batch_size=size, seed=tiny.SEED, num_epochs=None)
        position = position.after(len(batch))
        x = torch.stack([torch.randn(width, generator=torch.Generator().manual_seed(i), **shape) for i in batch])
        (model(x) - x.roll(1, -1)).square().mean().backward()
        for period, optim in optims:
            if step % period == 0:
                optim.step()
                optim.zero_grad()
        found[step] = tiny.checksum(model)
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("--attempt",),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--accumulate-other", "1"), marks=pytest.mark.slow),
        pytest.param(("--fsdp", "--snapshot-every", "1"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_accumulated_gradients_are_carried_when_a_member_is_lost_and_when_one_joins(
    tmp_path: Path, of_one_process: dict[int, float], flags: tuple[str, ...]
) -> None:
    """Two workers, one killed between two steps of the optimizer; another takes its place."""
    hold = Hold(tmp_path, 2 * EVERY + 2)
    with ForkedJob(tmp_path, script(*flags, *hold.flags), nnodes="2", workers_per_node=1) as job:
        job.start_node("a")
        job.start_node("b")
        hold.wait(job, 2, QUIET_S)
        job.kill_worker("b", 0)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0, "b": 0}, job.describe_logs()
        counted = count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)
        assert counted.lost == 0
        found = {event["step"]: event["checksum"] for event in job.of_kind("step")}
        right = checksums_of_one_process(EVERY, STEPS, 1) if "--accumulate-other" in flags else of_one_process
        assert found[STEPS] == pytest.approx(right[STEPS], rel=1e-9)
        assert len(job.of_kind("generation")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--snapshot-every", "--checkpoint"])
def test_accumulated_gradients_of_fsdp_go_along_when_a_node_is_taken_away_and_another_joins(
    tmp_path: Path, of_one_process: dict[int, float], flag: str
) -> None:
    """A spot instance is taken away between two steps of the optimizer; some steps later another one comes."""
    value = str(tmp_path / "checkpoints") if flag == "--checkpoint" else "1"
    hold = Hold(tmp_path, 2 * EVERY + 1)
    lines = script("--fsdp", flag, value, *hold.flags, steps=MANY_STEPS)
    with ForkedJob(tmp_path, lines, nnodes="1:2", workers_per_node=1) as job:
        job.start_node("a")
        job.start_node("b")
        hold.wait(job, 2, QUIET_S)
        job.preempt_node("b", QUIET_S)
        hold.end()
        job.wait_for(lambda event: event["kind"] == "step" and event["generation"] == 2, QUIET_S)
        left = ExitCode.LEFT if flag == "--checkpoint" else ExitCode.LEFT_WITHOUT_STATE
        assert job.agents["b"].wait(QUIET_S) == left, job.describe_logs()
        job.start_node("c")
        assert job.wait(QUIET_S) == {"a": 0, "b": left, "c": 0}, job.describe_logs()
        counted = count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)
        assert counted.lost == 0
        assert counted.repeated == 0 or flag == "--snapshot-every"
        assert [plan["axes"]["dp"] for plan in sorted(job.of_kind("generation"), key=lambda plan: plan["t"])][-1] == 2
        # All commits, also those before and after each change, are as if nothing had happened.
        found = {event["step"]: event["checksum"] for event in job.of_kind("step")}
        assert found == pytest.approx(of_one_process, rel=1e-9)
        last_steps = [max(event["step"] for event in job.of_kind("step", generation=one)) for one in (1, 2)]
        assert any(step % EVERY for step in last_steps), "both changes came right after a step of the optimizer"


@pytest.mark.parametrize("flags", [(), pytest.param(("--fsdp",), marks=pytest.mark.slow)], ids=" ".join)
def test_gradients_that_are_not_added_up_over_ranks_are_refused_at_once(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with ForkedJob(tmp_path, script("--reduce-late", *flags), nnodes="1") as job:
        job.start_node("a")
        assert job.wait(QUIET_S) == {"a": 1}, job.describe_logs()
        assert "accumulate inside one batch" in job.describe_logs()
        assert max(event["step"] for event in job.of_kind("step")) < EVERY
