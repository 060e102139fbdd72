"""Megatron-Bridge's own checkpoint manager writes and reads our files, on another number of ranks.

`make hosts` installs Bridge and a release of Megatron Core into a folder of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remesh.checkpoint.run.reader import open_checkpoint

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("bridge_rank.py")
_MEGATRON = _ROOT / ".hosts" / "megatron"
_PATIENCE_S = 240

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _needs_bridge() -> None:
    if not (_MEGATRON / "megatron" / "bridge").is_dir():
        pytest.skip("needs megatron-bridge and megatron-core, which `make hosts` installs")


def _run(action: str, directory: Path, size: int) -> None:
    paths = os.pathsep.join(map(str, (_MEGATRON, _ROOT / "src", _ROOT)))
    said = [directory.with_name(f"{action}-{rank}.txt") for rank in range(size)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            command = [sys.executable, str(_SCRIPT), action, str(directory), str(rank), str(size)]
            environment = {**os.environ, "PYTHONPATH": paths}
            with said[rank].open("wb") as file:
                ranks.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
                )
        for rank, one in enumerate(ranks):
            code = one.wait(timeout=_PATIENCE_S)
            assert code == 0, f"rank {rank}: {said[rank].read_text(errors='replace')[-3000:]}"
    finally:
        for one in ranks:  # and what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@pytest.mark.timeout(600)
def test_bridges_manager_saves_on_two_ranks_and_loads_on_three(tmp_path: Path) -> None:
    _run("save", tmp_path / "saved", 2)
    step = tmp_path / "saved" / "iter_0000005"
    assert (step / ".remesh-index").exists() and {"weight", "bias"} <= set(open_checkpoint(step).manifest.tensors)
    _run("load", tmp_path / "saved", 3)
