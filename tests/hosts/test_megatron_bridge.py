"""Megatron-Bridge's own training loop with our files: killed while it saves, gone on from, and under other meshes.

`make hosts` installs Bridge and a release of Megatron Core into a folder of their own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.hosts.jobs import run_job, stored_tensors

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("bridge_rank.py")
_NUM_WORDS = 64
_MEGATRON = _ROOT / ".hosts" / "megatron"

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _needs_bridge() -> None:
    if not (_MEGATRON / "megatron" / "bridge").is_dir():
        pytest.skip("needs megatron-bridge and megatron-core, which `make hosts` installs")


def _train(
    package: str,
    load: Path,
    save: Path,
    *,
    mesh: tuple[int, int, int] = (2, 2, 1),
    until: int = 6,
    interval: int = 2,
    killed_in: str = "",
) -> None:
    """A job of (ranks, tensor, pipeline parallelism); killed while all ranks but one save that checkpoint."""
    num_ranks, *cut = mesh
    command = [str(_SCRIPT), package, killed_in or "-", str(load), str(save), str(interval), *map(str, cut), str(until)]
    killed_when = save / "held" if killed_in else None
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (_MEGATRON, _ROOT / "src", _ROOT)))}
    run_job(num_ranks, command, save.parent, variables=variables, killed_when=killed_when)


@pytest.mark.timeout(1800)
def test_the_loop_goes_on_after_a_kill_in_a_save_and_under_other_meshes(tmp_path: Path) -> None:
    saved, whole = tmp_path / "ours" / "saved", tmp_path / "theirs" / "saved"
    saved.parent.mkdir()
    whole.parent.mkdir()
    _train("megatron", whole, whole)
    _train("remesh", saved, saved, killed_in="iter_0000006")
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    expected = _known(saved / "iter_0000004")
    assert sum(name.startswith("optimizer.state.fp32_param.") for name in expected) > 10
    for name, mesh in {"stages": (2, 1, 2), "replicas": (3, 1, 1)}.items():  # and saves at once what it has loaded
        (tmp_path / name).mkdir()
        _train("remesh", saved, tmp_path / name / "saved", mesh=mesh, until=4, interval=3)
        found = _known(tmp_path / name / "saved" / "iter_0000004")
        assert _differences(found, expected) == [], name
    _train("remesh", saved, saved)
    expected, found = _known(whole / "iter_0000006"), _known(saved / "iter_0000006")
    assert _differences(found, expected) == []


def _known(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors, without the rows of no word that Bridge adds to embeddings, as many as the mesh makes it."""
    tensors = stored_tensors(checkpoint)
    return {name: one[:_NUM_WORDS] if "word_embeddings" in name else one for name, one in tensors.items()}


def _differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in found | expected if name not in found or not found[name].equal(expected[name])]
