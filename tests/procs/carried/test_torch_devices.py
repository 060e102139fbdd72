"""A program that uses a GPU under `remesh torch`, with a make-believe driver: its device memory is in the image."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.procs.carried.torch_jobs import NEEDS_IMAGES, PROGRAMS, TorchJob

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(600), NEEDS_IMAGES]
_DEVICE = os.makedev(10, 200)  # of the tunnels: any that an image cannot hold


@pytest.fixture
def node() -> Iterator[str]:
    """The file of a device with a name like those of NVIDIA's."""
    path = f"/dev/nvidia-make-believe-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, _DEVICE)
            stack.callback(os.unlink, path)
            os.close(os.open(path, os.O_RDWR))
        except OSError as error:
            pytest.skip(f"needs a device to open: {error}")
        yield path


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The room of the make-believe driver, which every process finds in the place of NVIDIA's."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    room = tmp_path / "driver"
    room.mkdir()
    source, library = PROGRAMS / "fake_cuda.c", room / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(source)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(room))
    monkeypatch.setenv("MAKE_BELIEVE", str(room))
    monkeypatch.setenv("MAKE_BELIEVE_UUID", "7")
    return room


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchJob]:
    made = TorchJob(tmp_path / "job", 2)
    yield made
    made.close()


def _calls(driver: Path) -> Counter[str]:
    """What the driver was asked since the last look, and how often: an attempt may have been given up."""
    calls = (driver / "calls").read_text().splitlines()
    (driver / "calls").unlink()
    return Counter(calls)


def test_what_is_on_a_device_goes_through_checkpoints_and_a_restart_on_another_device(
    job: TorchJob, driver: Path, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run("on_device.py", node)
    job.wait_for(5)
    job.checkpoint()
    job.wait_for(len(job.lines()) + 5)
    calls = _calls(driver)
    assert calls["lock 10000"] == calls["checkpoint"] == calls["restore"] == calls["unlock"] >= job.size, calls
    job.stop()
    calls = _calls(driver)
    assert calls["lock 10000"] == calls["checkpoint"] == calls["restore"] + job.size, calls
    monkeypatch.setenv("MAKE_BELIEVE_UUID", "9")
    before = len(job.lines())
    job.restart()
    job.wait_for(before + 5)
    assert _calls(driver) == {"restore 7 to 9": job.size, "unlock": job.size}
    lines = job.lines()
    assert lines == [f"{step} {step * (step + 1)}" for step in range(1, len(lines) + 1)]


def test_a_driver_that_refuses_is_named_and_the_job_goes_on(job: TorchJob, driver: Path, node: str) -> None:
    job.run("on_device.py", node)
    job.wait_for(5)
    (driver / "refuses").touch()
    said = job.checkpoint()
    assert "cuCheckpointProcessCheckpoint gave 801 (operation not supported)" in said, said
    job.wait_for(len(job.lines()) + 5)
    calls = _calls(driver)
    assert calls["unlock"] == calls["lock 10000"] >= job.size and "restore" not in calls, calls
    (driver / "refuses").unlink()
    assert "checkpoint" in job.checkpoint()
    lines = job.lines()
    assert lines == [f"{step} {step * (step + 1)}" for step in range(1, len(lines) + 1)]


def test_without_a_driver_that_takes_checkpoints_the_device_is_refused_by_name(
    job: TorchJob, driver: Path, node: str
) -> None:
    job.run("on_device.py", node)
    job.wait_for(5)
    (driver / "libcuda.so.1").rename(driver / "gone")
    said = job.checkpoint()
    assert node in said and "a device" in said, said
    job.wait_for(len(job.lines()) + 5)
