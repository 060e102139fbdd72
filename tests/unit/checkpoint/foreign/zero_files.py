"""The files of a job under DeepSpeed ZeRO, made of whole random tensors by DeepSpeed's rules: the oracle of reading."""

from __future__ import annotations

import enum
import math
import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

KINDS = ("master", "exp_avg", "exp_avg_sq")
TAG = "global_step3"
Values = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Job:
    """A model, its groups of parameters, and how it was trained."""

    stage: int
    num_ranks: int
    groups: Sequence[dict[str, tuple[int, ...]]] = field(
        default=({"a.weight": (5, 3), "a.bias": (5,)}, {"b.weight": (7,)})
    )
    """No size of these is a multiple of the ranks."""
    shared: dict[str, str] = field(default_factory=lambda: {"head.weight": "a.weight"})
    """Second names of parameters."""

    def values(self) -> Values:
        generator = torch.Generator().manual_seed(6)
        return {
            kind: {
                name: torch.randn(shape, generator=generator) for group in self.groups for name, shape in group.items()
            }
            for kind in KINDS
        }


def random_job(chance: random.Random) -> Job:
    """Scalars, empty tensors, groups of one element, and more ranks than elements are among them."""
    names = iter("abcdefghijklmnop")
    groups = []
    for _ in range(chance.randint(1, 3)):
        shapes = [tuple(chance.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(chance.randint(0, 3)))]
        shapes += [
            tuple(chance.randint(1, 9) for _ in range(chance.randint(0, 3))) for _ in range(chance.randint(0, 4))
        ]
        groups.append({f"{next(names)}.weight": shape for shape in shapes})
    known = [name for group in groups for name in group]
    shared = {f"tied{number}.weight": chance.choice(known) for number in range(chance.randint(0, 2))}
    return Job(chance.choice([1, 2, 3]), chance.randint(1, 5), groups, shared)


def write_zero(folder: Path, job: Job) -> Values:
    """Write the tag and ``latest``; what was cut."""
    values = job.values()
    tag = folder / TAG
    tag.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    sys.modules.setdefault("deepspeed", types.ModuleType("deepspeed"))
    scaler = _own_class("LossScaler")()
    cut = {kind: _partitions(values[kind], job) for kind in KINDS}
    for rank in range(job.num_ranks):
        state = {
            number: {kind: cut[kind][rank][number] for kind in KINDS[1:]} | {"step": 3.0}
            for number in range(len(job.groups))
        }
        groups = [{"lr": (number + 1) / 10, "params": [number]} for number in range(len(job.groups))]
        base = {"state": state, "param_groups": groups}
        told = {"zero_stage": _stage_enum()(job.stage), "partition_count": job.num_ranks, "loss_scaler": scaler}
        if job.stage == 3:
            told |= {"fp32_flat_groups": cut["master"][rank], "optimizer_state_dict": base}
        else:
            told |= {"partition_count": [job.num_ranks] * len(job.groups), "base_optimizer_state": base}
            told |= {"single_partition_of_fp32_groups": cut["master"][rank]}
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": told, "ds_config": {}, "ds_version": "0.19.8"}, tag / name)
    model = {
        "module": {"norm.running": torch.ones(2, dtype=torch.bfloat16)},
        "buffer_names": ["norm.running"],
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in job.groups],
        "shared_params": job.shared,
        "lr_scheduler": {"last_epoch": 3},
        "ds_config": {"zero": scaler},
        "epoch": 2,
    }
    for rank in range(job.num_ranks if job.stage == 3 else 1):
        stem = f"zero_pp_rank_{rank}_mp_rank_00" if job.stage == 3 else "mp_rank_00"
        torch.save(model, tag / f"{stem}_model_states.pt")
    return values


def _partitions(values: dict[str, torch.Tensor], job: Job) -> list[list[torch.Tensor]]:
    """Rank -> group -> flat vector."""
    cut_groups = []
    for group in job.groups:
        cut_groups.append([torch.empty(0)] * job.num_ranks)
        if job.stage == 3:
            for name in group:
                length = math.ceil(values[name].numel() / job.num_ranks)
                padded = _padded(values[name].reshape(-1), length * job.num_ranks)
                parts = [padded[rank * length : (rank + 1) * length] for rank in range(job.num_ranks)]
                cut_groups[-1] = [torch.cat(both) for both in zip(cut_groups[-1], parts, strict=True)]
        else:
            vector = torch.cat([values[name].reshape(-1) for name in group])
            length = 2 * math.ceil(len(vector) / (2 * job.num_ranks))
            padded = _padded(vector, length * job.num_ranks)
            cut_groups[-1] = [padded[rank * length : (rank + 1) * length] for rank in range(job.num_ranks)]
    return [[group[rank].clone() for group in cut_groups] for rank in range(job.num_ranks)]


def _padded(vector: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([vector, torch.zeros(length - len(vector))])


def _own_class(name: str) -> type:
    """A class of DeepSpeed, which is not installed here."""
    module = sys.modules.setdefault("deepspeed.stand_in", types.ModuleType("deepspeed.stand_in"))
    made = type(name, (), {"__module__": "deepspeed.stand_in"})
    setattr(module, name, made)
    return made


_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}


def _stage_enum() -> Any:
    """As DeepSpeed tells its stages: by members of an enumeration of its own."""
    name, module = "ZeroStageEnum", sys.modules.setdefault("deepspeed.stand_in", types.ModuleType("deepspeed.stand_in"))
    made = enum.IntEnum(name, _STAGES, module=module.__name__)  # type: ignore[misc]
    setattr(module, name, made)
    return made
