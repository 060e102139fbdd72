"""Accelerate's own guide with our ``Accelerator``: saved, killed, and gone on from by another number of processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from remesh.foundation.errors import ConfigError
from tests.hosts.jobs import run_program, run_ranks, run_script, stored_tensors

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "integrations" / "accelerate_checkpointing.py"
_ON_CPUS = {"ACCELERATE_USE_CPU": "true"}


def _run(num_processes: int, folder: Path) -> tuple[int, str]:
    return run_ranks(num_processes, (str(_EXAMPLE), str(folder)), _ON_CPUS)


def _losses(output: str) -> dict[int, float]:
    words = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(line[1]): float(line[3]) for line in words}


@pytest.mark.timeout(1800)
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
    return run_program((sys.executable, str(folder / "whole.py"), str(folder)), _ON_CPUS)


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


class _Count:
    """An object to be registered."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_another_number_of_registered_objects_is_refused(tmp_path: Path) -> None:
    accelerator = _accelerator()
    accelerator.register_for_checkpointing(_Count(1), _Count(2))
    accelerator.save_state(tmp_path / "c")
    accelerator = _accelerator()
    accelerator.register_for_checkpointing(_Count(0))
    with pytest.raises(ConfigError, match="has 2 registered objects, expected 1"):
        accelerator.load_state(tmp_path / "c")


@pytest.mark.parametrize("holds", [(), ("first",), ("first", "second")])
def test_an_optimizer_whose_parameters_are_not_all_of_one_model_is_refused(
    tmp_path: Path, holds: tuple[str, ...]
) -> None:
    accelerator = _accelerator()
    models = {"first": torch.nn.Linear(2, 2), "second": torch.nn.Linear(3, 3)}
    loose = [] if len(holds) == 2 else [torch.nn.Parameter(torch.ones(3))]
    named = [parameter for name in holds for parameter in models[name].parameters()]
    accelerator.prepare(*models.values(), torch.optim.AdamW([*named, *loose]))
    with pytest.raises(ConfigError, match=f"all of its {len(named) + len(loose)} parameters"):
        accelerator.save_state(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def _named(folder: Path, **options: object):
    from accelerate.utils import ProjectConfiguration  # noqa: PLC0415

    accelerator = _accelerator(project_config=ProjectConfiguration(str(folder), **options))
    return accelerator, *_prepared(accelerator)


def test_a_save_for_each_machine_is_refused(tmp_path: Path) -> None:
    accelerator, *_ = _named(tmp_path, save_on_each_node=True)
    with pytest.raises(ConfigError, match="save_on_each_node"):
        accelerator.save_state(tmp_path / "c")


def test_the_newest_is_the_newest_complete_one_and_torn_ones_go_with_the_old(tmp_path: Path) -> None:
    accelerator, model, _ = _named(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator.save_state()
    weight = model.weight.detach().clone()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_1").mkdir()
    (folder / "checkpoint_1" / "__0_0.distcp").write_bytes(bytes(100))  # as a save leaves it that was killed
    model.weight.data.zero_()
    accelerator.load_state()
    assert model.weight.equal(weight)
    accelerator.project_configuration.iteration = 2
    for _ in range(2):
        accelerator.save_state()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]


def test_of_an_old_checkpoint_that_is_a_link_the_link_goes(tmp_path: Path) -> None:
    accelerator, _, _ = _named(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    accelerator.save_state()
    elsewhere, old = tmp_path / "elsewhere", tmp_path / "checkpoints" / "checkpoint_0"
    old.rename(elsewhere)
    old.symlink_to(elsewhere, target_is_directory=True)
    accelerator.save_state()
    assert [path.name for path in old.parent.iterdir()] == ["checkpoint_1"]
    assert any(elsewhere.iterdir())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_local_steps", [1, 8], ids=["batch_norm", "local_sgd"])
def test_what_processes_hold_apart_is_saved_as_the_first_one_has_it(tmp_path: Path, num_local_steps: int) -> None:
    script = Path(__file__).with_name("scripts") / "accelerate_apart.py"
    code, output = run_script(script, tmp_path / "c", num_local_steps)
    assert code == 0, output
    assert all(f"process {rank} apart True kept True" in output for rank in range(2)), output


def test_models_that_hooks_save_and_load_are_left_to_them(tmp_path: Path) -> None:
    """As in the training scripts of diffusers, which save adapters with hooks."""
    accelerator = _accelerator()
    (model, optimizer), other = _prepared(accelerator), accelerator.prepare(torch.nn.Linear(2, 2))

    def save(models, weights, folder):
        torch.save(weights.pop().copy(), f"{folder}/other.pt")
        assert len(models) == 2

    def load(models, folder):
        models.pop().load_state_dict(torch.load(f"{folder}/other.pt"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(tmp_path / "c")
    expected = [tensor.detach().clone() for tensor in (model.weight, other.weight)]
    assert "models.0.weight" in stored_tensors(tmp_path / "c")
    assert "models.1.weight" not in stored_tensors(tmp_path / "c")
    for tensor in (model.weight, other.weight):
        tensor.data.zero_()
    accelerator.load_state(tmp_path / "c")
    assert model.weight.equal(expected[0]) and other.weight.equal(expected[1])
    assert accelerator._models == [model, other] and optimizer.optimizer.state
