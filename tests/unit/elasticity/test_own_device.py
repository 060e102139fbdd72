"""Over NCCL every worker needs a GPU of its own: one that has none says so before it joins, and ends the job."""

from __future__ import annotations

import pytest
import torch

import remesh
from remesh.elasticity import job_api
from remesh.foundation.errors import ConfigError


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A worker in the second slot of a machine with GPUs; what its agent hears of the job's end."""
    told: list[str] = []
    monkeypatch.setenv("REMESH_LINK", "/nowhere")
    monkeypatch.setenv("REMESH_SLOT", "1")
    monkeypatch.setattr(job_api, "connect_agent", lambda path: path)
    monkeypatch.setattr(job_api, "refuse_job", lambda line, text: told.append(text))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return told


def test_a_worker_without_a_gpu_is_told_how_many_there_are(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"worker 1 of its machine.*there are 1 GPUs.*at most 1 \(--nproc-per-node\)"):
        remesh.elastic(lambda job: None, {"dp": -1})
    assert len(told) == 1 and "CUDA_VISIBLE_DEVICES=" in told[0]


def test_a_worker_with_a_gpu_goes_on(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    job_api._check_own_device()
    assert not told
