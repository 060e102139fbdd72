"""What a restart refuses before anything is started."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.rounds.job_folder import Checkpoint, JobSpec
from remesh.carried.torch import torch_job
from remesh.foundation.errors import ConfigError, FormatError


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Checkpoint, JobSpec]:
    """A checkpoint's store, and the job that it is of."""
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    (tmp_path / "store.json").write_text('{"key": "value"}')
    manifest: dict[str, Any] = {
        "torch": [torch_job._torch_version()],
        "script": [hashlib.sha256(b"pass\n").hexdigest()],
        "store_sha256": hashlib.sha256(b'{"key": "value"}').hexdigest(),
    }
    return Checkpoint(1, tmp_path, manifest), JobSpec(("train.py",), 1, str(tmp_path), {}, kind=torch_job.KIND)


def test_a_checkpoint_under_the_same_torch_and_script_is_taken(saved: tuple[Checkpoint, JobSpec]) -> None:
    assert torch_job._read_store(*saved) == {"key": "value"}


def test_another_version_of_torch_is_refused_by_both_versions(saved: tuple[Checkpoint, JobSpec]) -> None:
    checkpoint, spec = saved
    checkpoint.manifest["torch"] = ["1.13.1"]
    with pytest.raises(
        ConfigError, match=f"its torch is 1.13.1, found {torch_job._torch_version()}".replace("+", r"\+")
    ):
        torch_job._read_store(checkpoint, spec)


def test_another_script_and_one_that_is_gone_are_refused(saved: tuple[Checkpoint, JobSpec], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass  # else\n")
    with pytest.raises(ConfigError, match="its script is"):
        torch_job._read_store(*saved)
    (tmp_path / "train.py").unlink()
    with pytest.raises(ConfigError, match="must be at the same path"):
        torch_job._read_store(*saved)


def test_a_store_that_is_not_as_it_was_written_is_refused(saved: tuple[Checkpoint, JobSpec], tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"key": "valuf"}')
    with pytest.raises(FormatError, match="its digest does not match"):
        torch_job._read_store(*saved)
