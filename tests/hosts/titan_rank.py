"""One rank of torchtitan's own program, on the CPU: ``torchtitan.train`` as it is, for the rest of the command line.

torchtitan takes a GPU for granted where torch finds none. Of it nothing changes but where its tensors lie: what it
asks of a device, ``torch.cpu`` answers.
"""

from __future__ import annotations

import importlib
import os
import runpy
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

_divide = FSDPModule.set_gradient_divide_factor


def ours() -> Any:
    """torchtitan's own debug model, with the one line that names us."""
    config = importlib.import_module("torchtitan.models.llama3.config_registry").llama3_debugmodel()
    manager = importlib.import_module("remesh.integrations.torchtitan").RemeshCheckpointManager
    config.checkpoint = manager.Config(enable=True, interval=2, last_save_model_only=False)
    return config


def theirs() -> Any:
    """The same with torchtitan's own manager."""
    config = importlib.import_module("torchtitan.models.llama3.config_registry").llama3_debugmodel()
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    return config


def answer_for_a_device() -> None:
    """Make the CPU torchtitan's device, before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    cpu.get_device_name = lambda *_: "CPU"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    if not hasattr(dist, "set_timeout"):  # a later torch has it
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    barrier = dist.barrier
    dist.barrier = lambda *_, device_ids=None, **options: barrier(*_, **options)


def sum_by_gloo(module: Any, factor: float) -> None:
    """Divide gradients before they are summed: gloo has sums alone."""
    _divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)


def attend(query: Any, key: Any, value: Any, *, block_mask: Any, scale: float | None, **_: Any) -> Any:
    """What its attention computes; torch has no gradients of flex attention on the CPU."""
    shape = (*query.shape[:2], query.shape[2], key.shape[2])
    mask = importlib.import_module("torch.nn.attention.flex_attention").create_mask(block_mask.mask_mod, *shape, "cpu")
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return out, None


if __name__ == "__main__":
    answer_for_a_device()
    importlib.import_module("torchtitan.models.common.attention").FlexAttention._compiled_flex_attn = attend
    FSDPModule.set_gradient_divide_factor = sum_by_gloo  # type: ignore[method-assign]
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=False)
