"""Unmodified programs whose tensors are on a device: stopped, they go on with what they had there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.settings import CPU, SHARED, TWO, Setting, in_settings, skip_without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@in_settings(CPU, SHARED, TWO)
def test_tensors_on_a_device_are_there_after_a_restart(tmp_path: Path, setting: Setting) -> None:
    from tests.procs.carried.torch_jobs import NEEDS_IMAGES, TorchJob  # noqa: PLC0415 - it starts processes to examine the machine

    skip_without(setting.num_gpus)
    if NEEDS_IMAGES.args[0]:
        pytest.skip(NEEDS_IMAGES.kwargs["reason"])
    job = TorchJob(tmp_path / "job", setting.world_size)
    try:
        job.run("tensors_on.py", setting.backend, setting.device_type)
        job.wait_for(5)
        job.stop()
        job.restart()
        job.wait_for(len(job.lines()) + 5)
        lines = job.lines()
        added = 1000 * setting.world_size
        assert lines == [f"{step} {added * step * (step + 1) // 2}" for step in range(1, len(lines) + 1)]
    finally:
        job.close()
