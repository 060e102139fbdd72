"""Programs of torch.distributed that know nothing of us: stopped, restarted, compared with runs that nobody touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remesh.carried.rounds.job_folder import JobFolder
from tests.procs.carried.torch_jobs import NEEDS_IMAGES, TorchJob, go_on_and_compare, run_natively, stop_and_compare

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600), NEEDS_IMAGES]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchJob]:
    made = TorchJob(tmp_path / "job", 2)
    yield made
    made.close()


def test_data_parallel_training_goes_on_to_the_same_bits(job: TorchJob) -> None:
    stop_and_compare(job, 2, "ddp.py", 250, 1)


@pytest.mark.slow
def test_a_cut_waits_for_no_rank_that_computes_while_others_are_inside_collectives(
    job: TorchJob, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    job.size = 3
    job.run("late.py", str(go), options=("--round-limit", "30"))
    job.wait_for(3)
    job.stop()
    job.restart()
    job.stop()
    go.touch()
    job.restart()
    assert job.finish() == run_natively("late.py", 3, str(go))


@pytest.mark.slow
def test_works_of_every_kind_that_a_program_holds_across_a_cut_end_as_under_torch_alone(
    job: TorchJob, tmp_path: Path
) -> None:
    carried, alone = tmp_path / "carried", tmp_path / "alone"
    carried.mkdir()
    alone.mkdir()
    job.run("held.py", str(carried), options=("--round-limit", "30"))
    for number in ("1", "2", "3"):
        job.wait_for_line(f"held {number}")
        job.stop()
        (carried / number).touch()
        (alone / number).touch()
        job.restart("--round-limit", "30")
    assert job.finish() == run_natively("held.py", job.size, str(alone))


@pytest.mark.slow
def test_a_program_that_communicates_after_its_last_line_is_carried_until_it_ends_amid_a_checkpoint(
    job: TorchJob,
) -> None:
    alone = run_natively("lingers.py", job.size, "40")
    job.run("lingers.py", "40", "cut")
    job.wait_for(30)
    job.stop()
    job.restart()
    job.wait_for(len(alone))
    assert "checkpoint 2" in job.checkpoint()
    assert job.finish() == ["rank 0 leaves", "rank 1 leaves", *alone]


@pytest.mark.slow
def test_members_that_compare_what_they_call_do_so_after_a_restart_too(
    job: TorchJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the debug level DETAIL; a call that differs is refused on all ranks, in torch's words."""
    go = tmp_path / "go"
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    job.run("compared.py", str(go))
    job.wait_for_line("0 waits")
    job.wait_for_line("1 waits")
    job.stop()
    go.touch()
    job.restart()
    found = job.finish()
    assert found == run_natively("compared.py", 2, str(go))
    assert sum("Detected mismatch between collectives" in line for line in found) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "size", "steps", "stops", "more"),
    [
        ("ddp.py", 3, 400, 5, ()),
        ("fsdp.py", 4, 60, 5, ()),
        ("fsdp_transformer.py", 2, 200, 20, ()),
        ("pipeline.py", 3, 400, 20, ()),
        ("pipeline.py", 2, 200, 20, ("1", "2")),
        ("pipeline.py", 2, 200, 20, ("2", "2")),
        ("nanogpt.py", 2, 200, 5, ()),
        ("mingpt.py", 2, 400, 20, ("2",)),
        ("mingpt.py", 2, 200, 5, ("0", "--compile")),
    ],
)
def test_stopped_again_and_again_training_goes_on_to_the_same_bits(
    job: TorchJob, script: str, size: int, steps: int, stops: int, more: tuple[str, ...]
) -> None:
    stop_and_compare(job, size, script, steps, stops, *more)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "size", "steps", "more"),
    [
        ("ddp.py", 2, 400, ("2",)),
        ("fsdp_transformer.py", 2, 200, ()),
        ("pipeline.py", 3, 400, ()),
        ("mingpt.py", 2, 400, ("2",)),
    ],
)
def test_with_a_checkpoint_each_second_training_comes_to_the_same_bits(
    job: TorchJob, script: str, size: int, steps: int, more: tuple[str, ...]
) -> None:
    assert go_on_and_compare(job, size, script, steps, 1.0, *more) >= 2


@pytest.mark.long
def test_workers_of_a_data_loader_are_carried(job: TorchJob) -> None:
    stop_and_compare(job, 2, "ddp.py", 400, 2, "2")


@pytest.mark.long
def test_what_scripts_have_around_their_training_is_carried(job: TorchJob, tmp_path: Path) -> None:
    """Loggers with threads and children, handlers of signals, uneven inputs, a save of each epoch, an `atexit`."""
    folder = tmp_path / "its-own"
    folder.mkdir()
    stop_and_compare(job, 2, "imagenet.py", 64, 3, str(folder))
    # What runs natively here is forked, and calls nothing of the kind.
    assert sorted(path.name for path in folder.glob("exit-*")) == ["exit-0", "exit-1"]


@pytest.mark.long
def test_torchs_own_checkpoints_written_aside_are_carried(job: TorchJob, tmp_path: Path) -> None:
    stop_and_compare(job, 2, "fsdp_saves.py", 36, 3, str(tmp_path / "its-own"))


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_program_of_chance_gets_what_it_gets_from_torch_alone(job: TorchJob, seed: int) -> None:
    job.size = 3
    expected = run_natively("collectives.py", 3, str(seed), "1500")
    job.run("collectives.py", str(seed), "1500", options=("--every", "1.5"))
    job.wait_for(60)
    job.stop()
    job.restart("--every", "1.5")
    assert job.finish() == expected
    taken = [each.number for each in JobFolder(job.folder).checkpoints()]
    assert taken[-1] >= 2


@pytest.mark.long
@pytest.mark.parametrize(("seed", "size"), [(1, 2), (2, 3), (3, 2)])
def test_every_public_function_gives_what_it_gives_from_torch_alone(job: TorchJob, seed: int, size: int) -> None:
    job.size = size
    expected = run_natively("every_call.py", size, str(seed), "4")
    job.run("every_call.py", str(seed), "4")
    for moment in (30, 150):
        job.wait_for(moment)
        job.stop()
        job.restart()
    assert job.finish() == expected


@pytest.mark.long
@pytest.mark.parametrize(("seed", "size"), [(1, 2), (2, 3)])
def test_every_way_of_torch_to_train_data_parallel_gives_what_it_gives_from_torch_alone(
    job: TorchJob, seed: int, size: int
) -> None:
    """Hooks of communication, uneven inputs, sharded optimizers, averaged models, FSDP of old, tensor parallelism."""
    job.size = size
    expected = run_natively("ddp_ways.py", size, str(seed), "3")
    job.run("ddp_ways.py", str(seed), "3")
    for moment in (8, 40):
        job.wait_for(moment)
        job.stop()
        job.restart()
    assert job.finish() == expected
