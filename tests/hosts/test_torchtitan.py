"""torchtitan's checkpoint manager with our files: its own policies, other numbers of ranks, saves in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from remesh.foundation.errors import ConfigError
from remesh.testbed.pool import RankPool

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]


class _Optimizers:
    """As torchtitan's container: the state of all optimizers by names of parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state)


class _TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def _train(folder: str, async_mode: str, until: int) -> tuple[bool, int, list[float]]:
    """One job: goes on from the newest checkpoint, saves after every second step; its losses."""
    from remesh.integrations.torchtitan import RemeshCheckpointManager  # noqa: PLC0415 - a host may be missing

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = _TrainState()
    config = RemeshCheckpointManager.Config(
        enable=True, interval=2, async_mode=async_mode, keep_latest_k=2, last_save_model_only=False
    )
    manager = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=_Optimizers(model, optimizer),
        lr_schedulers=scheduler,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    assert type(manager) is RemeshCheckpointManager
    manager.states.pop("dataloader")
    was_there, losses = manager.load(), []
    inputs = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))
    first = state.step
    while state.step < until:
        loss = model(inputs[state.step]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
        state.step += 1
        manager.save(state.step)
    manager.maybe_wait_for_saving()
    manager.close()
    dist.barrier()
    return was_there, first, losses


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_job_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path, async_mode: str) -> None:
    folder = tmp_path / "checkpoint"
    was_there, _, begun = ranks.run(_train, 2, (str(tmp_path), async_mode, 5))[0]
    assert not was_there and len(begun) == 5
    assert (folder / "step-4" / ".metadata").is_file()
    (folder / "step-6").mkdir()  # as a save leaves it that was killed
    was_there, first, losses = ranks.run(_train, 3, (str(tmp_path), async_mode, 8))[0]
    whole = ranks.run(_train, 1, (str(tmp_path / "whole"), "disabled", 8))[0][2]
    assert was_there and first == 4 and losses == pytest.approx(whole[4:], rel=1e-4)
    assert (folder / "step-8" / ".metadata").is_file()


def test_saves_of_another_process_are_refused_by_name(tmp_path: Path) -> None:
    from remesh.integrations.torchtitan import RemeshCheckpointManager  # noqa: PLC0415

    config = RemeshCheckpointManager.Config(enable=True, async_mode="async_with_pinned_mem")
    with pytest.raises(ConfigError, match="async_with_pinned_mem"):
        RemeshCheckpointManager(config)
