"""Accelerate's own guide with our ``Accelerator``: saved, killed, and gone on from by another number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from remesh.errors import ConfigError

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "integrations" / "accelerate_checkpointing.py"


def _run(num_processes: int, folder: Path) -> tuple[int, str]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes))
    command = [sys.executable, *launch, str(_EXAMPLE), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def _losses(output: str) -> dict[int, float]:
    words = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(line[1]): float(line[3]) for line in words}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_killed_job_goes_on_with_another_number_of_processes(tmp_path: Path, num_processes: int) -> None:
    code, output = _run(2, tmp_path / "a")
    assert code != 0 and set(_losses(output)) == {1, 2, 3, 4, 5}, output
    code, output = _run(num_processes, tmp_path / "a")
    assert code == 0, output
    found = _losses(output)
    assert set(found) == {5, 6, 7, 8}, output
    code, whole = _run_whole(tmp_path / "b")
    assert code == 0, whole
    expected = _losses(whole)
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-3)
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]


def _run_whole(folder: Path) -> tuple[int, str]:
    """The same job, never killed: its first half is thrown away, and the second starts with nothing."""
    text = _EXAMPLE.read_text().replace("KILLED_AT, BATCH = 8, 5, 12", "KILLED_AT, BATCH = 8, 99, 12")
    folder.mkdir()
    (folder / "whole.py").write_text(text)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "whole.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def _accelerator(**options: object):
    from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: PLC0415 - a host may be missing

    from remesh.integrations.accelerate import RemeshAccelerator  # noqa: PLC0415

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return RemeshAccelerator(cpu=True, **options)


def _prepared(accelerator):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    accelerator = _accelerator()
    _prepared(accelerator)
    torch.manual_seed(5)
    accelerator.save_state(tmp_path / "c")
    expected = torch.rand(3)
    accelerator.load_state(tmp_path / "c")
    assert torch.rand(3).equal(expected)


def test_weights_and_moments_come_back_bit_by_bit(tmp_path: Path) -> None:
    accelerator = _accelerator()
    model, optimizer = _prepared(accelerator)
    accelerator.save_state(tmp_path / "c")
    weight = model.weight.detach().clone()
    moments = [state["exp_avg"].clone() for state in optimizer.optimizer.state.values()]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not model.weight.equal(weight)
    accelerator.load_state(tmp_path / "c")
    assert model.weight.equal(weight)
    assert all(
        state["exp_avg"].equal(was) for state, was in zip(optimizer.optimizer.state.values(), moments, strict=True)
    )


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    accelerator = _accelerator()
    _prepared(accelerator)
    with pytest.raises(ConfigError, match=r"\['exclude_frozen_parameters'\]"):
        accelerator.save_state(tmp_path / "c", exclude_frozen_parameters=True)
    with pytest.raises(ConfigError, match="no output_dir"):
        accelerator.save_state()
    accelerator.state.distributed_type = "DEEPSPEED"
    with pytest.raises(ConfigError, match="DeepSpeed keeps the state"):
        accelerator.save_state(tmp_path / "c")
    assert not (tmp_path / "c").exists()
