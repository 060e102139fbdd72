"""Real jobs on this machine, hurt for real. Each test opens with the situation it stands for."""

import os
import re
import signal
from pathlib import Path

import pytest

from remesh.foundation.exit_codes import ExitCode
from remesh.testbed.local_job import Event
from remesh.testbed.samples import SampleCount, count_samples
from tests.procs.forked_job import ForkedJob
from tests.procs.scripts import tiny
from tests.support.hold import Hold

pytestmark = pytest.mark.procs
SCRIPT = str(Path(tiny.__file__))
QUIET_S = 90.0


def script(*flags: str, steps: int = 30) -> list[str]:
    return [SCRIPT, "--mesh", "dp=-1", "--steps", str(steps), *flags]


def count(job: ForkedJob) -> SampleCount:
    return count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)


def checksums(events: list[Event]) -> dict[int, float]:
    return {event["step"]: event["checksum"] for event in events if event["kind"] == "step"}


def sizes(job: ForkedJob) -> list[int]:
    plans = {event["number"]: event["axes"]["dp"] for event in job.of_kind("generation")}
    return [plans[number] for number in sorted(plans)]


def draws(events: list[Event]) -> dict[tuple[int, int], float]:
    """(step, rank) -> what each rank drew at random in that step."""
    return {(event["step"], event["rank"]): event["draw"] for event in events if event["kind"] == "step"}


@pytest.fixture(scope="module")
def calm_events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """The events of a job that nothing happens to: dp=2, 30 steps."""
    with ForkedJob(tmp_path_factory.mktemp("undisturbed"), script("--pause-s", "0"), nnodes="1") as job:
        job.start_node("a")
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        return job.events


@pytest.fixture(scope="module")
def undisturbed(calm_events: list[Event]) -> dict[int, float]:
    """Step -> checksum of the weights, of a job that nothing happens to."""
    return checksums(calm_events)


@pytest.mark.parametrize("forks_workers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_worker_is_replaced_and_no_sample_is_lost(
    tmp_path: Path, undisturbed: dict[int, float], calm_events: list[Event], forks_workers: bool
) -> None:
    """One of three workers is killed: two go on as dp=2, a new process takes its place, dp=3 again."""
    hold = Hold(tmp_path, 6)
    with ForkedJob(tmp_path, script("--full-size", "3", *hold.flags, steps=80), nnodes="1", workers_per_node=3) as job:
        job.forks_workers = forks_workers
        job.start_node("a")
        hold.wait(job, 3, QUIET_S)
        job.kill_worker("a", 1)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        assert sizes(job) == [3, 2, 3]
        assert count(job) == SampleCount(lost=0, repeated=0, total=80 * tiny.BATCH_SIZE)
        assert checksums(job.events)[30] == pytest.approx(undisturbed[30], rel=1e-12)
        assert all(event["bytes_from_disk"] == 0 for event in job.of_kind("filled"))
        assert len(job.of_kind("worker-started")) == 4, job.describe_logs()  # the one in its place, too
        # Random state goes on through all meshes: the same step and share draw the same number.
        drawn, calm = draws(job.events), draws(calm_events)
        # The killed one may have died between its last step and telling of it.
        assert len(calm.keys() - drawn.keys()) <= 1
        assert all(drawn[key] == calm[key] for key in calm.keys() & drawn.keys())


@pytest.mark.slow
def test_a_stream_without_indices_goes_on_at_its_sample_after_a_death(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """The same samples come from an iterable, and one of two workers is killed and replaced."""
    hold = Hold(tmp_path, 8)
    flags = ("--stream", "by-epoch", "--full-size", "2", *hold.flags)
    with ForkedJob(tmp_path, script(*flags, steps=40), nnodes="1") as job:
        job.start_node("a")
        hold.wait(job, 2, QUIET_S)
        job.kill_worker("a", 1)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        assert count(job) == SampleCount(lost=0, repeated=0, total=40 * tiny.BATCH_SIZE)
        assert checksums(job.events)[30] == pytest.approx(undisturbed[30], rel=1e-12)


@pytest.mark.slow  # from a checkpoint also come those of the node that is preempted below
def test_boxes_that_died_with_their_node_come_from_the_last_checkpoint(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """FSDP over both nodes: half of every tensor dies with one of them, so all go back to the checkpoint of step 10."""
    hold = Hold(tmp_path, 14)
    flags = ("--fsdp", "--checkpoint", str(tmp_path / "checkpoints"), "--save-every", "10", *hold.flags)
    with ForkedJob(tmp_path, script(*flags), workers_per_node=1) as job:
        job.start_node("a")
        job.start_node("b")
        hold.wait(job, 2, QUIET_S)
        job.kill_node("b")
        hold.end()
        job.wait(QUIET_S)
        assert job.agents["a"].returncode == 0, job.describe_logs()
        filled = job.of_kind("filled", generation=2)
        assert {(event["source"], event["step"]) for event in filled} == {("checkpoint", 10)}
        assert "no rank alive holds box" in filled[0]["reason"]
        assert checksums(job.events) == pytest.approx(undisturbed, rel=1e-12)


def test_boxes_that_died_with_their_node_come_from_a_neighbours_memory(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """FSDP over both nodes and no checkpoint at all: half of every tensor comes from what the other node kept of it."""
    hold = Hold(tmp_path, 13)
    with ForkedJob(tmp_path, script("--fsdp", "--snapshot-every", "5", *hold.flags), workers_per_node=1) as job:
        job.start_node("a")
        job.start_node("b")
        hold.wait(job, 2, QUIET_S)
        job.kill_node("b")
        hold.end()
        job.wait(QUIET_S)
        assert job.agents["a"].returncode == 0, job.describe_logs()
        filled = job.of_kind("filled", generation=2)
        kept = {event["step"] for event in job.of_kind("snapshot-kept")}
        assert {event["source"] for event in filled} == {"snapshots"}, filled
        assert filled[0]["step"] in kept and filled[0]["step"] % 5 == 0
        assert f"went back to the snapshots of step {filled[0]['step']}" in filled[0]["reason"]
        assert checksums(job.events) == pytest.approx(undisturbed, rel=1e-12)
        assert count(job).lost == 0


@pytest.mark.slow
def test_a_job_whose_workers_all_die_without_checkpoints_ends_and_says_how_far_it_was(tmp_path: Path) -> None:
    """Both workers are killed at once. New ones could only begin at step 0, without a word to whoever pays for it."""
    hold = Hold(tmp_path, 8)
    with ForkedJob(tmp_path, script(*hold.flags), nnodes="1") as job:
        job.start_node("a")
        hold.wait(job, 2, QUIET_S)
        job.kill_worker("a", 0)
        job.kill_worker("a", 1)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 1}, job.describe_logs()
        lost = re.search(
            r"no rank alive holds state, and .* had come to step (\d+) or later", job.log_of("a").read_text()
        )
        assert lost is not None and 1 <= int(lost[1]) <= 8, job.describe_logs()
        assert {event["source"] for event in job.of_kind("filled")} == {"fresh"}  # as it began


def test_preempted_node_hands_over_and_no_step_is_repeated(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """SIGTERM to a node that alone holds half of every tensor (FSDP): all save, it leaves, the other goes on."""
    hold = Hold(tmp_path, 8)
    flags = ("--fsdp", "--checkpoint", str(tmp_path / "checkpoints"), *hold.flags)
    with ForkedJob(tmp_path, script(*flags)) as job:
        job.start_node("a")
        job.start_node("b")
        hold.wait(job, 4, QUIET_S)
        job.preempt_node("b", QUIET_S)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0, "b": ExitCode.LEFT}, job.describe_logs()
        left_at = {event["step"] for event in job.of_kind("left", generation=1)}
        filled = job.of_kind("filled", generation=2)
        assert {event["step"] for event in filled} == left_at
        assert {event["source"] for event in filled} == {"checkpoint"}
        assert count(job) == SampleCount(lost=0, repeated=0, total=30 * tiny.BATCH_SIZE)
        assert checksums(job.events) == pytest.approx(undisturbed, rel=1e-12)


def test_a_signal_to_all_processes_of_a_node_takes_no_state_away(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Slurm, and a container whose first process hands signals on, send SIGTERM to the workers as well as the agent."""
    hold = Hold(tmp_path, 8)
    flags = ("--fsdp", "--checkpoint", str(tmp_path / "checkpoints"), *hold.flags)
    with ForkedJob(tmp_path, script(*flags), workers_per_node=1) as job:
        job.start_node("a")
        job.start_node("b")
        hold.wait(job, 2, QUIET_S)
        for pid in job.worker_pids("b"):
            os.kill(pid, signal.SIGTERM)
        job.preempt_node("b", QUIET_S)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0, "b": ExitCode.LEFT}, job.describe_logs()
        assert len(job.of_kind("worker-started")) == 2
        assert count(job) == SampleCount(lost=0, repeated=0, total=30 * tiny.BATCH_SIZE)
        assert checksums(job.events) == pytest.approx(undisturbed, rel=1e-12)


def test_script_that_raises_ends_the_job_with_one_traceback(tmp_path: Path) -> None:
    """User code raises on one rank while the others wait for it in a collective."""
    with ForkedJob(tmp_path, script("--mishap", "raise"), nnodes="2", workers_per_node=1) as job:
        job.start_node("a")
        job.start_node("b")
        assert job.wait(QUIET_S) == {"a": 1, "b": 1}
        logs = "".join(job.log_of(node).read_text() for node in job.agents)
        assert logs.count("Traceback (most recent call last)") == 1, logs
        for node in job.agents:
            last_line = job.log_of(node).read_text().splitlines()[-1]
            assert "failed: ValueError: the sky is falling" in last_line
        assert not job.of_kind("worker-killed")


def test_script_that_ends_before_it_joins_is_named(tmp_path: Path) -> None:
    """The script calls sys.exit before remesh.elastic."""
    (tmp_path / "ends.py").write_text("import sys\nimport remesh\nsys.exit(3)\nremesh.elastic(print, {'dp': -1})\n")
    with ForkedJob(tmp_path, [str(tmp_path / "ends.py")], nnodes="1") as job:
        job.start_node("a")
        assert job.wait(QUIET_S) == {"a": 1}
        assert "ended before it called remesh.elastic (exit code 3)" in job.log_of("a").read_text()


def test_mesh_that_cannot_fit_ends_the_job_with_both_numbers(tmp_path: Path) -> None:
    """tp=2 over one worker, and no other node is expected."""
    (tmp_path / "wide.py").write_text("import remesh\nremesh.elastic(lambda job: None, {'dp': -1, 'tp': 2})\n")
    with ForkedJob(tmp_path, [str(tmp_path / "wide.py")], nnodes="1", workers_per_node=1) as job:
        job.start_node("a")
        assert job.wait(QUIET_S) == {"a": 2}
        assert "needs at least 2 workers, 1 are alive" in job.log_of("a").read_text()


def test_one_vote_against_drops_the_step_on_all_ranks(tmp_path: Path) -> None:
    """Rank 1 finds its step 6 bad, as with an overflow: nobody takes it, and the data moves on."""
    with ForkedJob(tmp_path, script("--mishap", "vote-no", "--pause-s", "0"), nnodes="1") as job:
        job.start_node("a")
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        steps = {(event["step"], event["rank"]) for event in job.of_kind("step")}
        assert steps == {(step, rank) for step in range(1, 31) if step != 6 for rank in (0, 1)}


@pytest.mark.slow  # the next one hangs, too, and is found in the other way
def test_worker_that_hangs_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    """A rank never enters the collective: the other times out, it does not leave when told, and is replaced."""
    flags = ("--mishap", "stuck", "--timeout-s", "8")
    with ForkedJob(tmp_path, script(*flags, steps=12), nnodes="1") as job:
        job.start_node("a", "--leave-timeout", "5")
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        assert [event["reason"] for event in job.of_kind("kill-worker")] == ["did not leave generation 1 in time"]
        assert count(job).lost == count(job).repeated == 0


def test_rank_that_hangs_is_named_with_all_stacks_and_replaced(tmp_path: Path) -> None:
    """A rank sleeps for an hour where the others wait for it; their collective would bear that for minutes."""
    flags = ("--mishap", "stuck", "--timeout-s", "600")
    with ForkedJob(tmp_path, script(*flags, steps=12), nnodes="2", workers_per_node=1) as job:
        job.start_node("a", "--hang-timeout", "6")
        job.start_node("b", "--hang-timeout", "6")
        assert job.wait(QUIET_S) == {"a": 0, "b": 0}, job.describe_logs()
        (hang,) = job.of_kind("hang", generation=1)
        assert "rank 0 waits in" in hang["reason"]
        assert "rank 1 is at tiny.py:" in hang["reason"] and "in take_step after step 5" in hang["reason"]
        assert "time.sleep(3600)" in hang["report"] and "rank 1 (culprit)" in hang["report"]
        assert [event["reason"] for event in job.of_kind("kill-worker")] == [f"hangs: {hang['reason']}"]
        assert count(job).lost == count(job).repeated == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_random_kills_lose_and_repeat_nothing(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """Whenever all four workers are back, somebody dies: a worker of either node, or a whole node."""
    kills_wanted = 20
    with ForkedJob(tmp_path, script("--pause-s", "0.02", steps=6000)) as job:
        job.start_node("a", "--max-restarts", "100")
        job.start_node("b", "--max-restarts", "100")
        num_kills, hurt, plan = 0, 0, {"axes": {"dp": 0}, "step": 0, "number": 0}
        for event in job.follow(800):
            if event["kind"] == "generation":
                plan = event
            if event["kind"] != "step" or event["generation"] != plan["number"]:
                continue
            # Once in a generation, whose steps are told long after it was hurt: a kill at each would kill all holders.
            is_whole = plan["axes"]["dp"] == 4 and event["step"] > plan["step"] + 10 and plan["number"] != hurt
            if job.agents["b"].poll() is not None:
                job.start_node("b", "--max-restarts", "100")
            elif is_whole and num_kills < kills_wanted:
                if num_kills % 3 == 2:
                    job.kill_node("b")
                else:
                    job.kill_worker("ab"[num_kills % 2], num_kills // 2 % 2)
                num_kills, hurt = num_kills + 1, plan["number"]
        assert job.agents["a"].returncode == job.agents["b"].returncode == 0, job.describe_logs()
        assert num_kills == kills_wanted
        assert count(job) == SampleCount(lost=0, repeated=0, total=6000 * tiny.BATCH_SIZE)
        assert checksums(job.events)[30] == pytest.approx(undisturbed[30], rel=1e-12)
