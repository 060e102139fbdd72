"""What breaks ends the job with its cause, or leaves it alone and says so; a checkpoint that is there stays good."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from remesh.carried.hosts.host_list import Host
from remesh.carried.mpi import mpi_job
from remesh.carried.mpi.mpi_job import Placement
from remesh.carried.rounds.job_folder import JobFolder
from remesh.carried.rounds.leader import Coordinator
from remesh.foundation.errors import ConfigError, FormatError
from remesh.foundation.linux.procfs import family_of, start_of
from remesh.testbed import Testbed
from remesh.wire import messages as frames
from tests.mpi.conftest import PROGRAMS, Job, ending_once, stop_after
from tests.mpi.patience import communicate_patiently, wait_until
from tests.mpi.test_library import compiled

pytestmark = pytest.mark.mpi

_LAPS = 30
_NO_IMAGE = "could not write its image"
_slow_in_c = pytest.mark.parametrize("ring", [pytest.param("C", marks=pytest.mark.slow), "Python"], indirect=True)


@dataclass(frozen=True)
class Ring:
    """A program in which a token goes round, and what four ranks of it answer after so many laps."""

    program: Path
    answer: str

    def create(self, job: Job, pause_s: float, num_ranks: int = 4) -> None:
        program = self.program.stem if self.program.suffix == ".py" else self.program
        job.create(program, _LAPS, pause_s, num_ranks=num_ranks)


@pytest.fixture(params=["C", "Python"])
def ring(request: pytest.FixtureRequest, tmp_path: Path) -> Ring:
    if request.param == "Python":
        return Ring(PROGRAMS / "ring.py", "answer b1cd1c8a14377307")
    return Ring(compiled("ring", "mpich", tmp_path), f"answer {_answer_in_c()}")


def _answer_in_c(num_ranks: int = 4, modulus: int = 1_000_003) -> int:
    """The same laps on one processor."""
    tokens, seen = list(range(1, num_ranks + 1)), [0] * num_ranks
    came: list[int] = []
    for _ in range(_LAPS):
        sent = [tokens[rank - 1] for rank in range(num_ranks)]
        if came:
            tokens = [(token * 31 + value) % modulus for token, value in zip(tokens, came, strict=True)]
        came = sent
        seen = [(each * 31 + token * 7 + sum(tokens)) % modulus for each, token in zip(seen, tokens, strict=True)]
    return sum(seen)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _kill(coordinator: Coordinator, rank: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(coordinator.describe()["ranks"][rank]["pid"], signal.SIGKILL)


@_slow_in_c
def test_a_rank_that_dies_ends_the_job_by_name_and_the_last_checkpoint_goes_on(job: Job, ring: Ring) -> None:
    ring.create(job, 0.1)
    take = stop_after(0.4, stop=False)

    def then_kill(coordinator: Coordinator) -> None:
        take(coordinator)
        if coordinator.last_checkpoint is not None:
            _kill(coordinator, 2)

    failed = job.stay("mpich", watch=then_kill)
    assert failed.outcome.state == "failed"
    assert "rank 2 on host" in failed.outcome.cause
    ended = job.stay("openmpi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == ring.answer


@pytest.mark.parametrize(
    ("mpi", "network"), [("openmpi", "tcp"), pytest.param("mpich", "ofi", marks=pytest.mark.slow), ("impi", "tcp")]
)
def test_a_rank_that_dies_while_long_messages_wait_for_receives_ends_the_job(job: Job, mpi: str, network: str) -> None:
    job.create("unreceived", 1, 60.0, num_ranks=2)
    ready_s: list[float] = []

    def kill_later(coordinator: Coordinator) -> None:
        if coordinator.all_ready:
            ready_s.append(time.monotonic())
            if ready_s[-1] - ready_s[0] > 1.0:
                _kill(coordinator, 1)

    failed = job.stay(Placement(mpi, network), watch=kill_later)
    assert failed.outcome.state == "failed" and "rank 1 on host" in failed.outcome.cause


@pytest.mark.slow
@pytest.mark.parametrize(("mpi", "network"), [("openmpi", "tcp"), ("mpich", "ofi"), ("impi", "tcp")])
def test_messages_that_are_never_received_do_not_keep_ranks_from_leaving(
    job: Job, mpi: str, network: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """MPICH does not free a communicator while messages stand in it."""
    job.create("abandoned", num_ranks=2)
    ended = job.stay(Placement(mpi, network))
    assert ended.outcome.state == "finished" and job.answer == "answer left", job.events
    assert "rror" not in capfd.readouterr().err


@pytest.mark.slow
def test_who_has_freed_a_send_waits_in_finalize_until_it_is_received_and_nobody_else_does(job: Job) -> None:
    job.create("late", num_ranks=3)
    asked: list[bool] = []

    def stop_in_finalize(coordinator: Coordinator) -> None:
        if not asked and all((job.gate.parent / name).exists() for name in ("ends.1", "ended.2")):
            asked.append(True)
            coordinator.request_checkpoint(stop=True)

    assert job.stay("mpich", watch=stop_in_finalize).outcome.state == "stopped", job.events
    ended = job.stay("openmpi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished" and job.answer == "answer True", job.events


@pytest.mark.slow
def test_a_rank_that_ends_with_an_exception_ends_the_job_though_others_wait_for_it(job: Job, tmp_path: Path) -> None:
    """MPI_Finalize of mpi4py runs at its exit, and waits for nobody."""
    program = tmp_path / "program.py"
    program.write_text("from mpi4py import MPI\nassert MPI.COMM_WORLD.rank != 1\nMPI.COMM_WORLD.recv(source=1)\n")
    job.create(Path(sys.executable), program, num_ranks=2)
    failed = job.stay("openmpi")
    assert failed.outcome.state == "failed" and "rank 1 on host" in failed.outcome.cause, job.events


def test_a_rank_that_dies_while_images_are_written_leaves_the_checkpoint_before(job: Job, ring: Ring) -> None:
    ring.create(job, 0.1)
    take = stop_after(0.4, stop=False)
    asked = []

    def kill_in_the_second(coordinator: Coordinator) -> None:
        take(coordinator)
        if coordinator.last_checkpoint is None:
            return
        if not asked:
            asked.append(True)
            coordinator.request_checkpoint(stop=False)
        if any(path.name.endswith(".part") for path in job.folder.images.iterdir()):
            _kill(coordinator, 1)

    failed = job.stay("mpich", watch=kill_in_the_second)
    assert failed.outcome.state == "failed", job.events
    assert [each.number for each in job.folder.checkpoints()] == [1]
    ended = job.stay("impi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == ring.answer


@pytest.mark.slow
def test_a_program_that_fails_ends_the_job_with_its_exit_status(job: Job) -> None:
    job.create("ring", "no number", 0)
    failed = job.stay("mpich")
    assert failed.outcome.state == "failed"
    assert failed.outcome.exit_code == 1
    assert "ended with exit status 1" in failed.outcome.cause


@pytest.mark.slow
def test_a_program_that_never_starts_mpi_fails_its_job_and_says_why(job: Job) -> None:
    job.create(Path("/bin/true"), num_ranks=2)
    ended = job.stay("mpich")
    assert ended.outcome.state == "failed" and ended.outcome.exit_code == 1, job.events
    assert "without having started MPI" in ended.outcome.cause


def test_what_cannot_be_imaged_is_refused_by_name_and_the_job_goes_on(job: Job) -> None:
    job.create("loner", 40, 0.1)
    ended = job.stay("mpich", watch=stop_after(1.5))
    assert ended.outcome.state == "finished", job.events
    assert any("rank 1 cannot be imaged" in line and "socket" in line for line in job.said), job.said
    assert job.folder.checkpoints() == []
    assert job.answer is not None


def test_a_full_disk_gives_the_checkpoint_up_and_the_job_goes_on(job: Job, ring: Ring) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    ring.create(job, 0.05)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(job.folder.images)], check=True)
    try:
        watch = ending_once(job, lambda _: any(_NO_IMAGE in line for line in job.said), stop_after(0.4))
        ended = job.stay("openmpi", watch=watch)
    finally:
        subprocess.run(["umount", str(job.folder.images)], check=True)
    assert ended.outcome.state == "finished", job.events
    assert any(_NO_IMAGE in line for line in job.said), job.said
    assert job.answer == ring.answer


@_slow_in_c
def test_a_leader_that_is_killed_takes_every_rank_with_it_and_the_last_checkpoint_goes_on(
    tmp_path: Path, job: Job, ring: Ring, remesh_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    program = (str(ring.program), str(_LAPS), "0.2")
    leader = remesh_cli("run", "-n", "4", "--mpi", "mpich", "--job", str(tmp_path / "j"), *program)
    wait_until(lambda: "running" in _text(tmp_path / "j" / "state.json"))
    said, _ = communicate_patiently(remesh_cli("checkpoint", str(tmp_path / "j")))
    assert "checkpoint 1" in said
    shown, _ = communicate_patiently(remesh_cli("show", str(tmp_path / "j")))
    processes = family_of(*(rank["pid"] for rank in json.loads(shown)["now"]["ranks"]))
    assert len(processes) >= 3 * 4  # lower half, init, program
    leader.kill()
    communicate_patiently(leader)
    wait_until(lambda: all(start_of(pid) is None for pid in processes))
    listed, _ = communicate_patiently(remesh_cli("ls"))
    assert "failed" in listed and "running" not in listed and "its coordinator, process" in listed, listed
    job.folder = JobFolder(tmp_path / "j")
    ended = job.stay("openmpi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == ring.answer


@pytest.mark.netns
def test_a_host_that_falls_silent_ends_the_job_by_name_and_the_last_checkpoint_goes_on(
    job: Job, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.create(job, 0.2)
    take = stop_after(0.4, stop=False)
    beds: list[Testbed] = []
    make_testbed = mpi_job.make_testbed
    monkeypatch.setattr(mpi_job, "make_testbed", lambda *args: beds.append(make_testbed(*args)) or beds[-1])
    monkeypatch.setattr(frames, "SILENCE_TIMEOUT_S", 3)

    def then_cut(coordinator: Coordinator) -> None:
        take(coordinator)
        if coordinator.last_checkpoint is not None and len(beds) == 1:
            beds[0].cut("b")
            beds.append(beds[0])

    hosts = (Host("a", 2), Host("b", 2))
    failed = job.stay(Placement("mpich", None, hosts, "full"), watch=then_cut)
    assert failed.outcome.state == "failed"
    assert "on host b is gone" in failed.outcome.cause
    ended = job.stay("openmpi", checkpoint=job.folder.checkpoint(None))
    assert ended.outcome.state == "finished", job.events
    assert job.answer == ring.answer


@pytest.mark.slow
def test_sigterm_takes_a_checkpoint_and_stops(tmp_path: Path, remesh_cli: Callable[..., subprocess.Popen[str]]) -> None:
    program = PROGRAMS / "ring.py"
    running = remesh_cli("run", "-n", "2", "--mpi", "mpich", "--job", str(tmp_path / "j"), str(program), "2000", "0.01")
    wait_until(lambda: "running" in _text(tmp_path / "j" / "state.json"))
    running.send_signal(signal.SIGTERM)
    output, _ = communicate_patiently(running)
    assert running.returncode == 0, output
    assert "stopped" in output
    shown, _ = communicate_patiently(remesh_cli("ls"))
    assert "stopped" in shown


@pytest.mark.slow
def test_sigterm_while_a_restart_comes_up_stops_it_by_its_checkpoint(
    tmp_path: Path, remesh_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    folder, program = tmp_path / "j", PROGRAMS / "ring.py"
    running = remesh_cli("run", "-n", "2", "--mpi", "mpich", "--job", str(folder), str(program), "2000", "0.01")
    for state, number in (("running", 1), ("starting", 1), ("starting", 1), ("running", 2)):
        wait_until(lambda state=state: f'"state": "{state}"' in _text(folder / "state.json"))
        running.send_signal(signal.SIGTERM)
        output, _ = communicate_patiently(running)
        assert running.returncode == 0 and f"stopped: checkpoint {number}" in output, output
        if number == 1:
            running = remesh_cli("restart", str(folder), "--mpi", "openmpi")


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_job_that_may_restart_goes_on_by_itself_when_a_rank_was_killed(
    tmp_path: Path, mpi: str, job: Job, remesh_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    folder, how = JobFolder(tmp_path / "j"), ("--mpi", mpi, "--every", "0.3", "--max-restarts", "2")
    program = str(PROGRAMS / "ring.py")
    running = remesh_cli("run", "-n", "4", *how, "--job", str(folder.path), program, str(_LAPS), "0.05")
    for restart in ("restart 1 of 2", "restart 2 of 2"):
        wait_until(lambda: "running" in _text(folder.path / "state.json") and bool(folder.checkpoints()))
        shown, _ = communicate_patiently(remesh_cli("show", str(folder.path)))
        os.kill(json.loads(shown)["now"]["ranks"][2]["pid"], signal.SIGKILL)
        wait_until(lambda: f"{restart}, from checkpoint" in _text(folder.logs / "events.log"))  # noqa: B023  waits here
    job.gate.touch()
    output, _ = communicate_patiently(running)
    assert running.returncode == 0, output
    assert "answer b1cd1c8a14377307" in output


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich", "openmpi", "impi"])
def test_what_a_program_prints_first_and_last_reaches_the_terminal(
    tmp_path: Path, mpi: str, remesh_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('first', flush=True)\nfrom mpi4py import MPI\nMPI.Finalize()\nprint('last')\n")
    running = remesh_cli("run", "-n", "2", "--mpi", mpi, "--job", str(tmp_path / "j"), str(program))
    output, _ = communicate_patiently(running)
    assert running.returncode == 0 and output.count("first\n") == output.count("last\n") == 2, output


def test_rank_0_reads_the_input_file_of_the_command_line_and_goes_on_with_it_after_a_restart(
    tmp_path: Path, remesh_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "input").write_text("".join(f"{number}\n" for number in range(300)))
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from mpi4py import MPI\n"
        "total = 0\n"
        "while line := MPI.COMM_WORLD.bcast(sys.stdin.buffer.raw.read(4) if MPI.COMM_WORLD.rank == 0 else None):\n"
        "    total += len(line)\n"
        "    time.sleep(0.02)\n"
        "print('answer', total, sys.stdin.read() == '')\n"
    )
    with (tmp_path / "input").open() as stdin:
        started = ("run", "-n", "2", "--mpi", "mpich", "--job", str(tmp_path / "j"), str(program))
        running = remesh_cli(*started, stdin=stdin.fileno())
        wait_until(lambda: "running" in _text(tmp_path / "j" / "state.json"))
        running.send_signal(signal.SIGTERM)
        output, _ = communicate_patiently(running)
    assert "stopped" in output
    ended = remesh_cli("restart", str(tmp_path / "j"), "--mpi", "openmpi")
    output, _ = communicate_patiently(ended)
    assert ended.returncode == 0, output
    for rank in range(2):
        assert _text(tmp_path / "j" / "logs" / f"rank-000{rank}.out") == "answer 1090 True\n"


@_slow_in_c
def test_a_checkpoint_whose_state_was_changed_is_refused(job: Job, ring: Ring) -> None:
    ring.create(job, 0.05, num_ranks=2)
    assert job.stay("mpich", watch=stop_after(0.3)).outcome.state == "stopped", job.events
    state = job.folder.checkpoint(None).rank_folder(1) / "lower.state"
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    failed = job.stay("mpich", checkpoint=job.folder.checkpoint(None))
    assert failed.outcome.state == "failed"
    assert "its digest does not match" in failed.outcome.cause


@_slow_in_c
def test_a_manifest_that_was_changed_is_refused_and_a_missing_one_is_no_checkpoint(job: Job, ring: Ring) -> None:
    ring.create(job, 0.05, num_ranks=2)
    assert job.stay("mpich", watch=stop_after(0.3)).outcome.state == "stopped", job.events
    folder = job.folder.checkpoint(None).path
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"num_ranks": 2', '"num_ranks": 3'))
    with pytest.raises(FormatError, match="digest"):
        job.folder.checkpoint(None)
    shutil.move(folder, folder.with_name(folder.name + ".part"))
    with pytest.raises(ConfigError, match="it has none"):
        job.folder.checkpoint(None)
