"""torch's launcher as a function, and ours in its place: the same values and errors, restarts while they remain."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as torchs

from remesh.foundation.errors import ConfigError
from remesh.integrations import launcher as ours
from remesh.testbed.rank_process import fork_server

pytestmark = [pytest.mark.procs, pytest.mark.filterwarnings("default")]


def _config(folder: Path, max_restarts: int = 0) -> ours.LaunchConfig:
    return ours.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method=fork_server().get_start_method(),  # which has torch already
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle="SIGTERM",
    )


def add_up(folder: str, failing_attempts: int) -> tuple[int, int]:
    """A worker: the sum of all ranks, and the attempt; the first ones fail."""
    dist.init_process_group("gloo")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, dist.get_rank() + 1)
    if attempt < failing_attempts and dist.get_rank() == 1:
        raise ValueError(f"attempt {attempt} is lost")
    dist.destroy_process_group()
    return sum(told), attempt


@pytest.fixture(autouse=True)
def _signals_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both launchers handle signals of the process that calls them from then on."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(torchs.elastic_launch, marks=pytest.mark.slow, id="torch"),
        pytest.param(ours.elastic_launch, id="ours"),
    ],
)
def test_values_and_errors_of_workers_are_those_of_torchs_launcher(launch: Callable[..., Any], tmp_path: Path) -> None:
    assert launch(_config(tmp_path / "a"), add_up)(str(tmp_path), 0) == {0: (3, 0), 1: (3, 0)}
    with pytest.raises(ChildFailedError, match="attempt 0 is lost"):
        launch(_config(tmp_path / "b"), add_up)(str(tmp_path), 1)


def test_workers_are_started_again_while_restarts_remain(tmp_path: Path) -> None:
    assert ours.launch_agent(_config(tmp_path, 2), add_up, [str(tmp_path), 2]) == {0: (3, 2), 1: (3, 2)}


def test_what_is_wrong_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no entrypoint"):
        ours.launch_agent(_config(tmp_path), None, [])
    monkeypatch.setenv("REMESH_TOKEN", "short")
    with pytest.raises(ConfigError, match="REMESH_TOKEN: found 5 bytes"):
        ours.launch_agent(_config(tmp_path), add_up, [])
