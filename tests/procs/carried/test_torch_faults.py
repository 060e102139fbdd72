"""What goes wrong under `remesh torch`: one clear error, nothing lost, nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.hosts.imaging import IMAGE
from remesh.carried.images.form.format import CHUNKS_FILE, PAGES_FILE
from remesh.carried.images.form.image_reader import read_tree, stored_pages
from remesh.carried.rounds.job_folder import JobFolder, rank_name
from remesh.carried.torch import torch_job
from remesh.carried.torch.successors import REFUSAL, prepare_successors
from remesh.foundation.checksums import crc32
from remesh.foundation.errors import Error
from remesh.foundation.exit_codes import ExitCode
from remesh.foundation.linux.procfs import children_of, start_of
from remesh.foundation.settings import PROGRAM
from tests.damage import damaged
from tests.procs.carried.torch_jobs import NEEDS_IMAGES, PATIENCE_S, PROGRAMS, REMESH, TorchJob, run_natively

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600), NEEDS_IMAGES]
_SMALL_BYTES = 30_000_000


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchJob]:
    """A job that was stopped: to restart it takes a fifth of the processor time that Python and torch take to start."""
    folder = tmp_path_factory.mktemp("steady")
    shutil.copy(PROGRAMS / "steady.py", folder)
    made = TorchJob(folder / "job", 2)
    try:
        made.run(str(folder / "steady.py"))
        made.wait_for(5)
        made.stop()
        # Its ranks wait in a collective nearly always, and what waits keeps no group of before the cut.
        assert "groups are still there" not in (made.folder / "logs" / "events.log").read_text()
        yield made
    finally:
        made.close()


@pytest.fixture
def stopped(steady: TorchJob, job: TorchJob) -> TorchJob:
    """A copy of the steady job with its one checkpoint, which lives by itself."""
    shutil.copytree(steady.folder, job.folder)
    return job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchJob]:
    """After it nothing is left of its processes."""
    made = TorchJob(tmp_path / "job", 2)
    yield made
    made.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while left := _processes_of(tmp_path):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def _processes_of(folder: Path) -> list[str]:
    """Commands that name the folder or work in it; a zombie has neither."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            where = os.readlink(process / "cwd")
        except OSError:
            continue
        if str(folder) in words or where.startswith(str(folder)):
            found.append(words.replace("\0", " "))
    return found


def _goes_on(job: TorchJob) -> None:
    job.wait_for(len(job.lines()) + 2)


def _restart(job: TorchJob, *options: str) -> None:
    """Until it goes on."""
    before = len(job.lines())
    job.restart(*options)
    job.wait_for(before + 2)


def _keepers(job: TorchJob) -> list[int]:
    """Processes that keep its ranks, as far as they have come up; nobody answers for a job between two stays."""
    shown = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    now = json.loads(shown.stdout).get("now")
    return [each["pid"] for each in now["ranks"]] if isinstance(now, dict) else []


def _only_these_are_left(job: TorchJob, *names: str) -> None:
    """Of its checkpoints, when one was given up; who asked for it is told before its files are gone."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := sorted(path.name for path in JobFolder(job.folder).images.iterdir())) != [*names]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def test_ranks_that_write_to_the_same_files_lose_nothing_and_write_nothing_twice(job: TorchJob, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    job.run("one_log.py", str(tmp_path))
    job.wait_for(2)
    assert "checkpoint 1" in job.checkpoint()
    _goes_on(job)
    job.stop()
    with log.open("a") as later:
        later.write("what came after the checkpoint\n")
    _restart(job)
    job.stop()
    lines = [line.split() for line in log.read_text().splitlines()]
    for rank, what in itertools.product(("0", "1"), ("beat", "step")):
        found = [int(line[2]) for line in lines if line[:2] == [rank, what]]
        assert found == list(range(1, len(found) + 1)) and len(found) > 10
    assert {tuple(line[1:2]) for line in lines} == {("beat",), ("step",)}
    # Of two ranks that have a file, one finds it bad: no other is cut.
    with log.open("a") as later:
        later.write("more\n")
    length = log.stat().st_size
    with (tmp_path / "table.npy").open("r+b") as table:
        table.truncate(100)
    job.restart()
    status, said = job.end()
    assert status == 1 and "table.npy" in said and "shorter" in said
    assert log.stat().st_size == length


def test_a_program_that_is_killed_while_it_stands_for_its_image_ends_the_job_by_its_name(stopped: TorchJob) -> None:
    _restart(stopped)
    keeper, images = _keepers(stopped)[1], JobFolder(stopped.folder).images
    (init,) = children_of(keeper)
    (program,) = children_of(init)
    with subprocess.Popen([*REMESH, "checkpoint", str(stopped.folder)], stderr=subprocess.DEVNULL):
        deadline_s = time.monotonic() + PATIENCE_S
        while not [*images.glob(f"*.part/{rank_name(1)}/{IMAGE}")]:
            assert time.monotonic() < deadline_s
        os.kill(program, signal.SIGKILL)
        status, said = stopped.end()
    assert status == 128 + signal.SIGKILL and "the program of rank 1" in said and "was killed by signal 9" in said
    _restart(stopped)


def test_a_script_that_starts_itself_again_is_carried(job: TorchJob) -> None:
    job.run("again.py", "exec", "100000")
    job.wait_for(5)
    assert "checkpoint 1" in job.checkpoint()
    job.stop()
    _restart(job)
    found = [line.split() for line in job.lines()]
    assert [int(step) for step, _ in found] == list(range(len(found)))


def test_a_python_of_a_program_finds_what_it_is_and_the_sitecustomize_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(PROGRAM.name, "")
    prepare_successors()
    program = (
        "import sys; from remesh.carried.torch.successors import find_lineage; print(find_lineage().value, sys.path)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("own\nchild") and "startup" not in done.stdout


@pytest.mark.parametrize("how", ["child", "fork"])
def test_ranks_that_a_program_makes_in_children_are_refused_at_their_first_call(job: TorchJob, how: str) -> None:
    job.size = 1
    job.run("again.py", how, "10")
    assert job.end()[0] == 1
    assert REFUSAL in "".join(path.read_text() for path in (job.folder / "logs").glob("*.err"))


@pytest.mark.slow
def test_children_forked_in_the_middle_of_collectives_are_carried_and_so_is_a_folder_that_was_moved(
    job: TorchJob, tmp_path: Path
) -> None:
    job.run("forks.py", "150")
    job.wait_for(20)
    job.stop()
    (tmp_path / "elsewhere").mkdir()
    job.folder = job.folder.rename(tmp_path / "elsewhere" / "moved")
    job.restart()
    assert job.finish() == run_natively("forks.py", 2, "150")


@pytest.mark.slow
def test_a_connection_of_the_program_is_refused_by_name_and_the_job_goes_on(job: TorchJob) -> None:
    job.run("odd.py", "socket")
    job.wait_for(2)
    said = job.checkpoint()
    assert "rank 1" in said and "socket" in said
    _goes_on(job)
    _only_these_are_left(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("backend", ("its-own", "Remesh can checkpoint gloo and nccl only")),
        ("symmetric memory", ("making symmetric memory", "Remesh cannot checkpoint memory that ranks share")),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name_where_it_is_made(
    job: TorchJob, which: str, words: tuple[str, ...]
) -> None:
    job.size = 1
    job.run("odd.py", which)
    status, said = job.end()
    assert status == 1
    told = (job.folder / "logs" / f"{rank_name(0)}.err").read_text()
    assert all(word in told for word in words), said


def test_a_disk_without_room_gives_the_checkpoint_up_and_the_job_goes_on(stopped: TorchJob) -> None:
    _restart(stopped)
    # No file of this rank's keeper may be longer, as on a disk that has no more room.
    subprocess.run(["prlimit", f"--pid={_keepers(stopped)[1]}", f"--fsize={_SMALL_BYTES}"], check=True)
    said = stopped.checkpoint()
    assert "rank 1 could not write its image" in said and "File too large" in said
    _goes_on(stopped)
    _only_these_are_left(stopped, "000001")


def test_a_hundred_damages_to_a_checkpoint_are_refused_by_name_or_change_nothing(stopped: TorchJob) -> None:
    """As a restart reads it, without a process; afterwards two restarts at once lead to one."""
    folder, chance = JobFolder(stopped.folder), random.Random(19)
    whole = _read_as_a_restart_does(folder, with_pages=True)
    files = sorted(path for path in folder.checkpoint(None).path.rglob("*") if path.is_file())
    num_refused = 0
    for _ in range(100):
        path = chance.choice(files)
        with damaged(path, chance) as how:
            with_pages = path.name in (PAGES_FILE, CHUNKS_FILE)
            try:
                found = _read_as_a_restart_does(folder, with_pages=with_pages)
                assert found == whole[: len(found)], f"{path}, {how}"
            except Error as error:
                assert path.name in str(error) or str(path.parent) in str(error), f"{path}, {how}: {error}"
                num_refused += 1
    assert num_refused > 90
    before = len(stopped.lines())
    both = [TorchJob(stopped.folder, 2), stopped]
    for each in both:
        each.restart()
    stopped.leader = _find_the_one_that_leads(both)
    stopped.wait_for(before + 2)


def _read_as_a_restart_does(folder: JobFolder, *, with_pages: bool) -> list[Any]:
    checkpoint = folder.checkpoint(None)
    trees = [read_tree(checkpoint.rank_folder(rank) / IMAGE) for rank in range(2)]
    found: list[Any] = [checkpoint.manifest, torch_job._read_store(checkpoint, folder.read_spec()), *trees]
    for member in [member for tree in trees for member in tree.members] if with_pages else ():
        found.append([(offset, crc32(raw)) for offset, raw in stored_pages(member.folder)])
    return found


def _find_the_one_that_leads(jobs: list[TorchJob]) -> subprocess.Popen[str]:
    leaders = [each.leader for each in jobs if each.leader is not None]
    deadline_s = time.monotonic() + PATIENCE_S
    while not (ended := [leader for leader in leaders if leader.poll() is not None]):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    (refused,) = ended
    assert "expected no leader; stop it first" in refused.communicate(timeout=PATIENCE_S)[1]
    (leading,) = (leader for leader in leaders if leader is not refused)
    return leading


@pytest.mark.slow
def test_a_rank_that_dies_while_images_are_written_leaves_the_checkpoint_before(stopped: TorchJob) -> None:
    status, before = 0, list[int]()
    while status == 0:  # a rank may have written all before this process gets to its next line
        before = [each.number for each in JobFolder(stopped.folder).checkpoints()]
        status, said = _kill_a_rank_that_writes(stopped)
    assert status == 1 and "rank 1" in said
    assert [each.number for each in JobFolder(stopped.folder).checkpoints()] == before
    _restart(stopped)


def _kill_a_rank_that_writes(job: TorchJob) -> tuple[int, str]:
    """How the job ended, whose rank 1 was killed as soon as it had begun its part of a checkpoint that stops."""
    _restart(job)
    keeper, known = _keepers(job)[1], {*JobFolder(job.folder).images.iterdir()}
    assert job.leader is not None
    job.ask_to_stop()
    deadline_s = time.monotonic() + PATIENCE_S
    images = JobFolder(job.folder).images
    while job.leader.poll() is None and all(path.parent in known for path in images.glob(f"*/{rank_name(1)}")):
        assert time.monotonic() < deadline_s
    with contextlib.suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGKILL)
    return job.end()


@pytest.mark.slow
def test_a_restart_that_is_told_to_stop_while_it_comes_up_has_lost_nothing(stopped: TorchJob) -> None:
    for _ in range(3):
        stopped.restart()
        stopped.ask_to_stop(once="starting")
        status, said = stopped.end()
        assert (status, stopped.state()) == (0, "stopped"), said
        assert "checkpoint 1 holds" in said
    _restart(stopped)


@pytest.mark.slow
def test_a_program_that_leaves_by_os_exit_in_the_middle_of_a_checkpoint_is_part_of_it(job: TorchJob) -> None:
    job.run("leaves.py", "python")
    job.wait_for(2)
    assert "checkpoint 1" in job.checkpoint()
    assert "checkpoint 2" in job.checkpoint()
    job.wait_for(len(job.lines()) + 2)
    # Rank 0 is alone now, which no checkpoint minds.
    assert "checkpoint 3" in job.checkpoint()
    assert job.leader is not None and job.leader.poll() is None


@pytest.mark.slow
def test_a_program_that_ends_without_a_word_in_the_middle_of_a_checkpoint_ends_the_job_by_its_name(
    job: TorchJob,
) -> None:
    job.run("leaves.py", "c")
    job.wait_for(2)
    assert "checkpoint 1" in job.checkpoint()
    job.checkpoint()
    status, said = job.end()
    assert status == 1
    assert "the program of rank 1" in said and "in the middle of a checkpoint" in said
    checkpoint = JobFolder(job.folder).checkpoint(1)
    assert checkpoint.problem == ""
    job.restart("--checkpoint", "1")
    _goes_on(job)


@pytest.mark.slow  # that only one of two leads is above
def test_a_job_that_is_led_is_led_by_nobody_else(stopped: TorchJob) -> None:
    _restart(stopped)
    second = subprocess.run([*REMESH, "restart", str(stopped.folder)], capture_output=True, text=True)
    assert second.returncode == 2
    assert "leads it, expected no leader" in second.stderr
    asked = subprocess.run([*REMESH, "checkpoint", str(stopped.folder), "--stop"], capture_output=True, text=True)
    assert "stopped" in asked.stdout, asked.stderr
    assert stopped.end()[0] == 0


def test_a_rank_that_dies_ends_the_job_and_leaves_its_checkpoints(stopped: TorchJob) -> None:
    _restart(stopped)
    os.kill(_keepers(stopped)[1], signal.SIGKILL)
    status, said = stopped.end()
    assert status == 1
    assert "rank 1" in said
    assert not JobFolder(stopped.folder).checkpoints()[0].problem
    _restart(stopped)


def test_a_job_goes_on_by_itself_after_a_rank_has_died_as_often_as_it_may(stopped: TorchJob) -> None:
    _restart(stopped, "--max-restarts", "1")
    _kill_a_rank_and_wait_for_the_next(stopped)
    _goes_on(stopped)
    os.kill(_keepers(stopped)[1], signal.SIGKILL)
    status, said = stopped.end()
    assert status == 1
    assert "restart 1 of 1, from checkpoint 1" in said


@pytest.mark.slow
def test_a_job_whose_ranks_are_killed_again_and_again_prints_what_an_undisturbed_one_prints(
    job: TorchJob, tmp_path: Path
) -> None:
    """It takes its checkpoints by itself."""
    go = tmp_path / "go"
    job.run("steady.py", "250", str(go), options=("--max-restarts", "9", "--every", "0.5"))
    while not JobFolder(job.folder).checkpoints():
        job.wait_for(len(job.lines()) + 1)
    for num_lines in (60, 120, 180):
        job.wait_for(num_lines)
        _kill_a_rank_and_wait_for_the_next(job)
    go.touch()
    assert job.finish() == run_natively("steady.py", 2, "250", str(go))


def _kill_a_rank_and_wait_for_the_next(job: TorchJob) -> None:
    before, deadline_s = _keepers(job), time.monotonic() + PATIENCE_S
    os.kill(before[1], signal.SIGKILL)
    while len({*_keepers(job)} - {*before}) < len(before):
        assert job.leader is not None and job.leader.poll() is None, job.end()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_what_does_not_fit_a_checkpoint_is_refused_and_harms_nothing(stopped: TorchJob, steady: TorchJob) -> None:
    folder = JobFolder(stopped.folder).checkpoint(None).path
    script, store = steady.folder.parent / "steady.py", folder / "store.json"
    with _changed(script, script.read_bytes() + b"# another one\n"):
        assert "its script is" in _refused(stopped, ExitCode.USAGE)
    with _changed(store, store.read_bytes()[:-1]):
        assert "its digest does not match" in _refused(stopped, ExitCode.FAILED)
    pages = next(path for path in sorted((folder / rank_name(1)).rglob("pages.bin")))
    whole = pages.read_bytes()
    with _changed(pages, whole[:4096] + bytes([whole[4096] ^ 1]) + whole[4097:]):
        assert "rank 1" in _refused(stopped, ExitCode.FAILED)
    other = subprocess.run(
        [sys.executable, "-m", "remesh", "mpi", "restart", str(stopped.folder)], capture_output=True, text=True
    )
    assert other.returncode == 2
    assert "remesh torch restart" in other.stderr
    _restart(stopped)


@contextlib.contextmanager
def _changed(path: Path, content: bytes) -> Iterator[None]:
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def _refused(job: TorchJob, code: ExitCode) -> str:
    job.restart()
    status, said = job.end()
    assert status == code
    return said


def test_when_the_leader_is_killed_nothing_is_left_and_the_checkpoint_stays(stopped: TorchJob) -> None:
    """One that it took by itself, as it was told to."""
    _restart(stopped, "--every", "1")
    deadline_s = time.monotonic() + PATIENCE_S
    while len(JobFolder(stopped.folder).checkpoints()) == 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    keepers = _keepers(stopped)
    assert stopped.leader is not None
    stopped.leader.kill()
    stopped.leader.communicate(timeout=PATIENCE_S)
    while any(start_of(pid) is not None for pid in keepers):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    _restart(stopped)
