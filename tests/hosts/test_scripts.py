"""Scripts of hosts' guides with what nobody here has in mind: ours, killed, ends with the bits of the host's, unharmed.

Several models and optimizers, layers that are tied or frozen, adapters, accumulated gradients, bf16, schedules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.jobs import run_script

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_SCRIPTS = Path(__file__).with_name("scripts")


def _run(script: str, folder: Path, kind: str, killed_at: int) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    return run_script(_SCRIPTS / script, folder, kind, killed_at)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("script", "killed_at"), [("accelerate_gan.py", 5), ("trainer_lora.py", 5), ("lightning_gan.py", 4)]
)
def test_a_killed_job_ends_with_the_bits_of_the_hosts_own_that_was_not(
    tmp_path: Path, script: str, killed_at: int
) -> None:
    code, output = _run(script, tmp_path / "ours", "ours", killed_at)
    assert code != 0 and "SIGKILL" in output and not (tmp_path / "ours" / "end.pt").exists(), output
    for kind in ("ours", "theirs"):
        code, output = _run(script, tmp_path / kind, kind, -1)
        assert code == 0, output
    found, expected = (torch.load(tmp_path / kind / "end.pt") for kind in ("ours", "theirs"))
    assert _differences(found, expected) == []


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The places at which two nests differ."""
    if isinstance(one, torch.Tensor):
        return [] if one.equal(other) else [path]
    if not isinstance(one, dict | list):
        return [] if one == other else [path]
    if isinstance(one, list):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if one.keys() != other.keys():
        return [path]
    return [place for key in one for place in _differences(one[key], other[key], f"{path}.{key}")]
