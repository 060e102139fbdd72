"""One rank of a job under DeepSpeed: trains, saves as DeepSpeed does, and writes down what each parameter really is.

    deepspeed_rank.py STAGE FOLDER                begins, saves, and goes on
    deepspeed_rank.py STAGE FOLDER universal      resumes from the universal checkpoint in the folder
    deepspeed_rank.py STAGE FOLDER "" OPTION      begins, with an option of zero_optimization

Under torchrun. The first rank leaves `expected.pt` in the folder: of each parameter the whole master values and
moments at the save, the module's own values, and the losses of the steps that follow.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

KINDS = ("exp_avg", "exp_avg_sq")
_SAVED_AT = 3


class Net(torch.nn.Module):
    """No size is a multiple of the ranks; one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.two = torch.nn.Linear(7, 3)
        self.register_buffer("running", torch.arange(7.0))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.two(self.norm(torch.tanh(self.one(given))))


def main(stage: int, folder: str, resumed: str = "", *options: str) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deepspeed = importlib.import_module("deepspeed")
    # Shared memory between ranks of one host needs a compiler, and has no part in checkpoints.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.manual_seed(len(resumed))
    net = Net()
    weights = [one for name, one in net.named_parameters() if name.endswith("weight")]
    biases = [one for name, one in net.named_parameters() if name.endswith("bias")]
    made = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.05)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "sub_group_size": 20, **dict.fromkeys(options, True)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": bool(resumed)},
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=net, optimizer=made, config=config, dist_init_required=False)
    batches = _batches()
    if resumed:
        _, client = engine.load_checkpoint(folder)
        assert client["epoch"] == 2 and engine.global_steps == _SAVED_AT
        engine.module.load_state_dict(client["buffers"], strict=False)
        assert engine.module.running.equal(torch.arange(7.0).bfloat16())
        _part_counters(made)
        for _ in range(_SAVED_AT):
            next(batches)
    else:
        for _ in range(_SAVED_AT):
            _step(engine, next(batches))
        engine.save_checkpoint(folder, client_state={"epoch": 2})
    told: dict[str, object] = {"parameters": _told_by(engine, optimizer, stage)}
    told["module"] = {name: one.detach().clone() for name, one in engine.module.named_parameters()}
    told["losses"] = [_step(engine, next(batches)) for _ in range(2)]
    if dist.get_rank() == 0:
        torch.save(told, f"{folder}/expected.pt")
        with open(f"{folder}/version.json", "w") as file:
            json.dump(deepspeed.__version__, file)
    dist.barrier()


def _batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        yield torch.randn(2, 5, generator=generator).bfloat16()


def _step(engine: Any, given: torch.Tensor) -> float:
    loss = engine(given).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def _part_counters(optimizer: torch.optim.Optimizer) -> None:
    """Give each state a counter of its own: under ZeRO 3 DeepSpeed has put one tensor into all of them."""
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()


def _told_by(engine: object, optimizer: object, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Of each parameter the whole master values and moments, as DeepSpeed itself gathers them."""
    utils = importlib.import_module("deepspeed.utils")
    if stage < 3:  # it links the states when it first steps, before there are any
        optimizer._hp_optimizer_states_linked = False  # type: ignore[attr-defined]
        optimizer._lazy_init_hp_params_optimizer_state()  # type: ignore[attr-defined]
    return {
        name: {
            "master": utils.safe_get_full_fp32_param(parameter),
            **{kind: utils.safe_get_full_optimizer_state(parameter, kind) for kind in KINDS},
        }
        for name, parameter in engine.module.named_parameters()  # type: ignore[attr-defined]
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), *sys.argv[2:])
