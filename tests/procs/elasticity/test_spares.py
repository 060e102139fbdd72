"""A spare takes the place of a worker that was killed, and the others stay in their loops."""

from pathlib import Path

import pytest

from remesh.testbed.local_job import Event
from remesh.testbed.samples import SampleCount, count_samples
from tests.procs.forked_job import ForkedJob
from tests.procs.scripts import split, tiny
from tests.support.hold import Hold

pytestmark = pytest.mark.procs
QUIET_S = 90.0


def test_spare_takes_over_and_nobody_enters_the_training_function_anew(tmp_path: Path) -> None:
    """Two places and three workers; one of the two is killed. The process that replaces it is the next spare."""
    hold = Hold(tmp_path, 5)
    script = [tiny.__file__, "--mesh", "dp=2", "--steps", "40", "--attempt", *hold.flags]
    with ForkedJob(tmp_path, script, nnodes="1", workers_per_node=3) as job:
        job.start_node("a", "--max-restarts", "1")
        hold.wait(job, 2, QUIET_S)
        job.kill_worker("a", 1)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        second = job.of_kind("generation", number=2)[0]
        assert second["in_place"] and second["axes"] == {"dp": 2}
        assert [member["slot"] for member in second["members"]] == [0, 2]
        entered = [(event["generation"], event["rank"]) for event in job.of_kind("entered")]
        assert sorted(entered) == [(1, 0), (1, 1), (2, 1)]
        found = count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)
        assert found == SampleCount(lost=0, repeated=0, total=40 * tiny.BATCH_SIZE)
        sums = {(event["step"], round(event["checksum"], 9)) for event in job.of_kind("step")}
        assert sorted(step for step, _ in sums) == list(range(1, 41))


def replace_a_seat(job: ForkedJob, hold: Hold) -> tuple[Event, Event]:
    """Three nodes, one of which stands by; one with a seat is killed at the hold. Both generations, as decided."""
    for node in ("a", "b", "c"):
        job.start_node(node)
    first = job.wait_for(lambda event: event["kind"] == "generation", QUIET_S)
    seats = [first["hosts"][str(one["node"])] for one in first["members"]]
    hold.wait(job, 2, QUIET_S)
    job.kill_node(seats[1])
    hold.end()
    job.wait(QUIET_S)
    assert job.agents[seats[0]].returncode == 0, job.describe_logs()
    (second, *_) = job.of_kind("generation", number=2)
    assert second["members"][1]["pid"] == first["standby"][0]["pid"]
    return first, second


def assert_nothing_moved(job: ForkedJob) -> None:
    """Both ranks went back to a snapshot, and found all that they needed in their own nodes' memory."""
    filled = job.of_kind("filled", generation=2)
    assert [event["source"] for event in filled] == ["snapshots", "snapshots"], filled
    assert [event["bytes_taken"] for event in filled] == [0, 0], "nothing crossed between ranks"
    assert filled[0]["bytes_kept"] > 0


def test_spare_finds_the_state_of_its_seat_in_its_own_nodes_memory(tmp_path: Path) -> None:
    """A model in two halves, checkpoints and snapshots at the same steps: the other half goes on in its loop."""
    hold, checkpoints = Hold(tmp_path, 13), str(tmp_path / "checkpoints")
    script = [split.__file__, "--steps", "24", "--every", "5", "--checkpoint", checkpoints, *hold.flags]
    with ForkedJob(tmp_path, script, nnodes="1:3", workers_per_node=1) as job:
        _, second = replace_a_seat(job, hold)
        # Of a checkpoint of the same step, memory is the nearer source.
        assert second["in_place"] and second["axes"] == {"tp": 2}
        assert_nothing_moved(job)
        assert sorted((event["generation"], event["rank"]) for event in job.of_kind("entered")) == [
            (1, 0),
            (1, 1),
            (2, 1),
        ]
        assert not job.of_kind("generation", number=3)
        losses: dict[int, set[float]] = {}
        for event in job.of_kind("step"):
            losses.setdefault(event["step"], set()).add(event["loss"])
        assert sorted(losses) == list(range(1, 25))
        assert all(len(told) == 1 for told in losses.values()), "steps taken again came to the same"


@pytest.mark.long
def test_spare_finds_its_shards_in_its_own_nodes_memory_under_fsdp(tmp_path: Path) -> None:
    """FSDP over two nodes: all enter anew, and no byte has to move either."""
    hold = Hold(tmp_path, 13)
    flags = ["--fsdp", "--snapshot-every", "5", *hold.flags]
    script = [tiny.__file__, "--mesh", "dp=2", "--steps", "24", *flags]
    with ForkedJob(tmp_path, script, nnodes="1:3", workers_per_node=1) as job:
        replace_a_seat(job, hold)
        assert_nothing_moved(job)
        assert count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=3).lost == 0


@pytest.mark.long
def test_slow_worker_is_left_out_at_a_step_and_nothing_is_lost(tmp_path: Path) -> None:
    """One of four workers takes six times as long. Three go on without it; the fourth stands by for half a minute."""
    script = [tiny.__file__, "--mesh", "dp=-1", "--steps", "150", "--slow", "a/2"]
    with ForkedJob(tmp_path, script, nnodes="1", workers_per_node=4) as job:
        job.start_node("a", "--exclude-slower", "2", "--exclude-slower-steps", "10")
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        second = job.of_kind("generation", number=2)[0]
        assert second["axes"] == {"dp": 3} and [one["slot"] for one in second["standby"]] == [2]
        assert "worker 2 of a was slow; 3 workers fit dp=3" in second["reason"]
        (pause,) = job.of_kind("pause", generation=1)
        assert "worker 2 of a (rank 2) works" in pause["reason"] and "allowed are 2 x" in pause["reason"]
        assert job.of_kind("excluded")[0]["seconds"] == 30
        assert {event["source"] for event in job.of_kind("filled", generation=2)} == {"peers"}
        found = count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)
        assert found == SampleCount(lost=0, repeated=0, total=150 * tiny.BATCH_SIZE)


@pytest.mark.long
def test_slow_workers_seat_goes_to_a_spare_and_nobody_else_enters_anew(tmp_path: Path) -> None:
    """Three places, a spare, and one that is slow: two processes change places, the others stay in their loops."""
    script = [tiny.__file__, "--mesh", "dp=3", "--steps", "110", "--attempt", "--slow", "a/1"]
    with ForkedJob(tmp_path, script, nnodes="1", workers_per_node=4) as job:
        job.start_node("a", "--exclude-slower", "2", "--exclude-slower-steps", "10", "--exclude-delay", "4")
        assert job.wait(2 * QUIET_S) == {"a": 0}, job.describe_logs()
        second = job.of_kind("generation", number=2)[0]
        assert second["in_place"] and [one["slot"] for one in second["members"]] == [0, 3, 2]
        assert sorted((event["generation"], event["rank"]) for event in job.of_kind("entered")) == [
            *((1, 0), (1, 1), (1, 2), (2, 1)),
        ]
        # Once it has rested it comes back only if that makes the mesh larger.
        assert not job.of_kind("generation", number=3)
        found = count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)
        assert found == SampleCount(lost=0, repeated=0, total=110 * tiny.BATCH_SIZE)
