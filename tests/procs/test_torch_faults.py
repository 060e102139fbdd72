"""What goes wrong under `remesh torch`: one clear error, nothing lost, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remesh.checksums import crc32
from remesh.errors import Error
from remesh.images.format import CHUNKS_FILE, PAGES_FILE
from remesh.images.stored import read_tree, stored_pages
from remesh.ranks.imaging import IMAGE
from remesh.rounds.job_folder import JobFolder, rank_name
from remesh.torch_programs import stay
from tests.procs.torch_jobs import NEEDS_IMAGES, PATIENCE_S, REMESH, TorchJob, run_natively

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600), NEEDS_IMAGES]
_SMALL_BYTES = 30_000_000


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


def _checkpoint(job: TorchJob) -> str:
    asked = subprocess.run([*REMESH, "checkpoint", str(job.folder)], capture_output=True, text=True, timeout=PATIENCE_S)
    return asked.stdout + asked.stderr


def _goes_on(job: TorchJob) -> None:
    job.wait_for(len(job.lines()) + 2)


def _nothing_is_left_of_it(job: TorchJob) -> None:
    """Of a checkpoint that was given up; who asked for it is told before its files are gone."""
    deadline_s = time.monotonic() + PATIENCE_S
    while left := list(JobFolder(job.folder).images.iterdir()):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


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


def test_a_connection_of_the_program_is_refused_by_name_and_the_job_goes_on(job: TorchJob) -> None:
    job.run("odd.py", "socket")
    job.wait_for(2)
    said = _checkpoint(job)
    assert "rank 1" in said and "socket" in said
    _goes_on(job)
    assert JobFolder(job.folder).checkpoints() == []
    _nothing_is_left_of_it(job)


def test_a_backend_that_is_not_known_is_refused_by_name(job: TorchJob) -> None:
    job.run("odd.py", "backend")
    status, said = job.end()
    assert status == 1
    told = (job.folder / "logs" / f"{rank_name(0)}.err").read_text()
    assert "its-own" in told and "Remesh can checkpoint gloo and nccl only" in told, said


def test_a_disk_without_room_gives_the_checkpoint_up_and_the_job_goes_on(job: TorchJob) -> None:
    job.run("steady.py")
    job.wait_for(5)
    now = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    # No file of this rank's keeper may be longer, as on a disk that has no more room.
    keeper = json.loads(now.stdout)["now"]["ranks"][1]["pid"]
    subprocess.run(["prlimit", f"--pid={keeper}", f"--fsize={_SMALL_BYTES}"], check=True)
    said = _checkpoint(job)
    assert "rank 1 could not write its image" in said and "File too large" in said
    _goes_on(job)
    _nothing_is_left_of_it(job)


def test_a_hundred_damages_to_a_checkpoint_are_refused_by_name_or_change_nothing(job: TorchJob) -> None:
    """As a restart reads it, without a process; afterwards two restarts at once lead to one."""
    job.run("ddp.py", "100000")
    job.wait_for(5)
    job.stop()
    folder, chance = JobFolder(job.folder), random.Random(19)
    whole = _read_as_a_restart_does(folder, with_pages=True)
    files = sorted(path for path in folder.checkpoint(None).path.rglob("*") if path.is_file())
    num_refused = 0
    for _ in range(100):
        path = chance.choice(files)
        with _damaged(path, chance) as how:
            with_pages = path.name in (PAGES_FILE, CHUNKS_FILE)
            try:
                found = _read_as_a_restart_does(folder, with_pages=with_pages)
                assert found == whole[: len(found)], f"{path}, {how}"
            except Error as error:
                assert path.name in str(error) or str(path.parent) in str(error), f"{path}, {how}: {error}"
                num_refused += 1
    assert num_refused > 90
    before = len(job.lines())
    both = [TorchJob(job.folder, 2), job]
    for each in both:
        each.restart()
    job.leader = _find_the_one_that_leads(both)
    job.wait_for(before + 2)


def _read_as_a_restart_does(folder: JobFolder, *, with_pages: bool) -> list[Any]:
    checkpoint = folder.checkpoint(None)
    trees = [read_tree(checkpoint.rank_folder(rank) / IMAGE) for rank in range(2)]
    found: list[Any] = [checkpoint.manifest, stay._read_store(checkpoint, folder.read_spec()), *trees]
    for member in [member for tree in trees for member in tree.members] if with_pages else ():
        found.append([(offset, crc32(raw)) for offset, raw in stored_pages(member.folder)])
    return found


@contextlib.contextmanager
def _damaged(path: Path, chance: random.Random) -> Iterator[str]:
    """A bit of a file is flipped, or its end is missing; it is whole again after that."""
    size = path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        at = chance.randrange(size)
        file.seek(at)
        end = file.read() if chance.random() < 0.3 else b""
        file.seek(at)
        byte = end[:1] or file.read(1)
        file.seek(at)
        if end:
            file.truncate()
        else:
            file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
        try:
            yield f"cut at {at}" if end else f"flipped at {at}"
        finally:
            file.seek(at)
            file.write(end or byte)


def _find_the_one_that_leads(jobs: list[TorchJob]) -> subprocess.Popen[str]:
    leaders = [each.leader for each in jobs if each.leader is not None]
    deadline_s = time.monotonic() + PATIENCE_S
    while not (ended := [leader for leader in leaders if leader.poll() is not None]):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    (refused,) = ended
    assert "leads it, expected nobody" in refused.communicate()[1]
    (leading,) = (leader for leader in leaders if leader is not refused)
    return leading


def test_a_rank_that_dies_while_images_are_written_leaves_the_checkpoint_before(job: TorchJob) -> None:
    job.run("ddp.py", "100000")
    job.wait_for(5)
    assert "checkpoint 1" in _checkpoint(job)
    now = subprocess.run([*REMESH, "show", str(job.folder)], capture_output=True, text=True, check=True)
    keeper = json.loads(now.stdout)["now"]["ranks"][1]["pid"]
    assert job.leader is not None
    job.leader.send_signal(signal.SIGTERM)
    images, deadline_s = JobFolder(job.folder).images, time.monotonic() + PATIENCE_S
    while not _begun(images):
        assert time.monotonic() < deadline_s
    os.kill(keeper, signal.SIGKILL)
    status, said = job.end()
    assert status == 1 and "rank 1" in said
    assert [each.number for each in JobFolder(job.folder).checkpoints()] == [1]
    job.restart()
    _goes_on(job)


def _begun(images: Path) -> list[Path]:
    """Folders of rank 1 in checkpoints after the first."""
    return [each for each in images.glob(f"*/{rank_name(1)}") if not each.parent.name.endswith("000001")]
