"""Lightning's Trainer with our strategy and plugin: saved, killed, and gone on from by another number of processes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.foundation.errors import ConfigError
from tests.hosts.jobs import run_ranks, stored_tensors

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "integrations" / "lightning_model_parallel.py"


def _run(launcher: tuple[str, ...], num_processes: int, folder: Path, script: Path = _EXAMPLE) -> tuple[int, str]:
    return run_ranks(num_processes, (str(script), str(folder)), launcher=launcher)


def _losses(output: str) -> dict[int, float]:
    words = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(line[1]): float(line[3]) for line in words}


@pytest.mark.timeout(1800)
def test_a_killed_job_goes_on_with_another_number_of_processes_under_either_launcher(tmp_path: Path) -> None:
    code, output = _run(("remesh.run", "--mode", "restart"), 2, tmp_path / "a")
    assert code == 1 and set(_losses(output)) == {1, 2, 3, 4, 5}, output
    before = _losses(output)
    code, output = _run(("torch.distributed.run",), 3, tmp_path / "a")
    assert code == 0, output
    found = _losses(output)
    assert set(found) == {5, 6, 7, 8}, output
    assert found[5] == pytest.approx(before[5], rel=1e-3)
    whole = tmp_path / "whole.py"
    whole.write_text(_EXAMPLE.read_text().replace("KILLED_AT = 8, 5", "KILLED_AT = 8, 99"))
    code, output = _run(("torch.distributed.run",), 1, tmp_path / "b", whole)
    assert code == 0, output
    expected = _losses(output)
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-3)


def _plugin():
    from remesh.integrations.lightning import RemeshCheckpointIO  # noqa: PLC0415 - a host may be missing

    return RemeshCheckpointIO()


def _fit(folder: Path, steps: int, checkpoint: Path | None = None) -> torch.Tensor:
    import lightning  # noqa: PLC0415
    from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: PLC0415

    torch.manual_seed(1)
    model = BoringModel()
    trainer = lightning.Trainer(
        accelerator="cpu",
        plugins=[_plugin()],
        max_steps=steps,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "last.ckpt")
    return model.layer.weight.detach().clone()


def test_a_file_of_the_plugin_is_lightnings_own_and_is_resumed_from(tmp_path: Path) -> None:
    weight = _fit(tmp_path, 3)
    theirs = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert theirs["global_step"] == 3 and theirs["state_dict"]["layer.weight"].equal(weight)
    assert not _fit(tmp_path / "more", 5, tmp_path / "last.ckpt").equal(weight)
    assert torch.load(tmp_path / "more" / "last.ckpt", weights_only=True)["global_step"] == 5


def test_a_file_is_replaced_in_one_step_and_removed(tmp_path: Path) -> None:
    plugin, path = _plugin(), tmp_path / "deep" / "a.ckpt"
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, path)
    plugin.save_checkpoint({"state_dict": {"w": torch.zeros(2)}}, path)
    assert plugin.load_checkpoint(path)["state_dict"]["w"].equal(torch.zeros(2))
    assert [one.name for one in path.parent.iterdir()] == ["a.ckpt"]
    plugin.remove_checkpoint(path)
    assert not path.exists()


class _Strange:
    """A class that nobody has allowed."""


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    plugin, path = _plugin(), tmp_path / "a.ckpt"
    with pytest.raises(CheckpointingException, match="_Strange"):
        plugin.save_checkpoint({"hyper_parameters": _Strange()}, path)
    assert not path.exists()
    with pytest.raises(ConfigError, match="no storage_options"):
        plugin.save_checkpoint({}, path, storage_options={"anon": True})
    with pytest.raises(ConfigError, match="weights_only=False runs code"):
        plugin.load_checkpoint(path, weights_only=False)
    with pytest.raises(CheckpointingException, match="correct the path"):
        plugin.load_checkpoint(path)


def _save_sharded(model: torch.nn.Module, path: Path) -> None:
    from remesh.integrations.lightning import RemeshModelParallelStrategy  # noqa: PLC0415 - a host may be missing

    strategy = RemeshModelParallelStrategy()
    strategy.model = model
    strategy.save_checkpoint({"state_dict": model.state_dict(), "epoch": 1}, path)


def test_a_save_over_the_link_to_the_last_checkpoint_keeps_what_it_led_to(tmp_path: Path) -> None:
    """As ``ModelCheckpoint(save_last="link")`` asks for in a resumed job, before it has saved a checkpoint itself."""
    best, last, model = tmp_path / "best", tmp_path / "last", torch.nn.Linear(2, 2)
    _save_sharded(model, best)
    expected = model.weight.detach().clone()
    last.symlink_to(best.name)
    with torch.no_grad():
        model.weight.zero_()
    _save_sharded(model, last)
    assert not last.is_symlink() and not stored_tensors(last)["state_dict.weight"].any()
    assert stored_tensors(best)["state_dict.weight"].equal(expected)


def test_of_a_link_to_a_checkpoint_the_link_alone_is_removed(tmp_path: Path) -> None:
    best, last = tmp_path / "best", tmp_path / "last"
    _save_sharded(torch.nn.Linear(2, 2), best)
    last.symlink_to(best.name)
    _plugin().remove_checkpoint(last)
    assert not last.is_symlink() and sorted(stored_tensors(best)) == ["state_dict.bias", "state_dict.weight"]
    _plugin().remove_checkpoint(best)
    assert list(tmp_path.iterdir()) == []


def test_one_gathered_file_is_refused() -> None:
    from remesh.integrations.lightning import RemeshModelParallelStrategy  # noqa: PLC0415

    with pytest.raises(ConfigError, match="save_distributed_checkpoint=False"):
        RemeshModelParallelStrategy(save_distributed_checkpoint=False)


def test_a_strategy_that_is_asked_to_run_code_of_a_file_refuses(tmp_path: Path) -> None:
    from remesh.integrations.lightning import RemeshModelParallelStrategy  # noqa: PLC0415

    with pytest.raises(ConfigError, match="weights_only=False runs code"):
        RemeshModelParallelStrategy().load_checkpoint(tmp_path, weights_only=False)
