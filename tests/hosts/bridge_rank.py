"""One rank under Megatron-Bridge's own checkpoint manager, with this package in the place of Megatron's checkpoints.

    bridge_rank.py save|load DIRECTORY RANK SIZE

The manager is Bridge's, as its factory makes it, with its save and load around the checkpoint. What it imports and
has no part in this is left out by name: packages that are built for CUDA, and Bridge's own models, adapters and data.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from tests.interop.training_rank import OnCpu, imitate_a_gpu

_STEP = 5
_LEFT_OUT = (
    *("modelopt", "nvidia_resiliency_ext", "flash_attn", "mistral_common", "wandb"),
    *("megatron.bridge.models", "megatron.bridge.peft", "megatron.bridge.data"),
)


class _Empty(types.ModuleType):
    """A module whose names are all classes with nothing in them."""

    __path__: list[str] = []  # noqa: RUF012 - as modules have it

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)  # type: ignore[no-any-return]


class _LeftOut(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module where one is asked for that is left out."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_left_out = any(name == one or name.startswith(f"{one}.") for one in _LEFT_OUT)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_left_out else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: its names come when they are asked for."""


def import_bridge() -> Any:
    """Bridge's module of checkpoints, without the package's list of models."""
    sys.meta_path.insert(0, _LeftOut())
    above = importlib.import_module("megatron")
    bridge = types.ModuleType("megatron.bridge")
    bridge.__path__ = [str(Path(folder) / "bridge") for folder in above.__path__]
    sys.modules["megatron.bridge"] = bridge
    checkpointing: Any = importlib.import_module("megatron.bridge.training.checkpointing")
    # What is asked of parts that are left out, or of a running training loop.
    for name in ("on_checkpointing_start", "on_checkpointing_end", "on_checkpoint_loaded"):
        setattr(checkpointing.fault_tolerance, name, lambda *_, **__: None)
    checkpointing.get_rerun_state_machine = lambda: MagicMock(state_dict=lambda **_: None)
    checkpointing.update_num_microbatches = lambda **_: None
    checkpointing.save_sharded_modelopt_state = lambda *_: None
    checkpointing._get_model_glu_interleave_sizes = lambda *_: (None, None)
    return checkpointing


class Net(torch.nn.Linear):
    """Six rows, cut among the ranks."""

    config = SimpleNamespace(num_layers=1)

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(3, 6 // size)
        self.place = (0, rank, size)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        make = importlib.import_module("megatron.core.dist_checkpointing").ShardedTensor.from_rank_offsets
        return {name: make(name, value, self.place) for name, value in self.state_dict(keep_vars=True).items()}


def state_of(directory: str) -> Any:
    """What a job of Bridge keeps: its configuration and where training is."""
    config = importlib.import_module("megatron.bridge.training.config")
    kinds = dict.fromkeys(("save_optim", "save_rng", "load_optim", "load_rng"), False)
    checkpoint = config.CheckpointConfig(save=directory, load=directory, ckpt_format="torch_dist", **kinds)
    told = {
        "model": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
        "checkpoint": {"save_rng": False, "save_optim": False, "fully_parallel_save": False},
    }
    cfg = MagicMock(peft=None, dataset=None, dist=None, ddp=None, checkpoint=checkpoint)
    cfg.to_yaml = lambda path: Path(path).write_text(json.dumps(told))
    cfg.optimizer.use_distributed_optimizer = cfg.rng.data_parallel_random_init = False
    cfg.model.tensor_model_parallel_size = cfg.model.pipeline_model_parallel_size = 1
    train_state = importlib.import_module("megatron.bridge.training.state").TrainState(step=_STEP)
    return MagicMock(cfg=cfg, train_state=train_state, async_calls_queue=None)


def main(action: str, directory: str, rank: int, size: int) -> None:
    imitate_a_gpu()
    importlib.import_module("remesh.integrations.megatron_core").put_in_place()
    checkpointing = import_bridge()
    dist.init_process_group("gloo", init_method=f"file://{directory}.{action}", rank=rank, world_size=size)
    parallel: Any = importlib.import_module("megatron.core.parallel_state")
    parallel.get_nccl_options = lambda *_: None
    parallel.initialize_model_parallel(1, 1)
    groups = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
    expected = torch.arange(24.0).reshape(6, 4).chunk(size)[rank]
    with OnCpu():
        net, state = Net(rank, size), state_of(directory)
        manager = checkpointing.create_checkpoint_manager(state.cfg.checkpoint)
        assert type(manager).__module__.startswith("megatron.bridge")
        given = {"state": state, "model": [net], "optimizer": None, "opt_param_scheduler": None}
        if action == "save":
            net.load_state_dict({"weight": expected[:, :3], "bias": expected[:, 3]})
            context = checkpointing.CheckpointSaveContext(**given, num_floating_point_operations_so_far=7)
            context.pg_collection = groups.use_mpu_process_groups()
            manager.save(context, None)
        else:
            context = checkpointing.CheckpointLoadContext(**given)
            context.pg_collection = groups.use_mpu_process_groups()
            assert manager.load(context)[0] == _STEP
            assert net.weight.equal(expected[:, :3]) and net.bias.equal(expected[:, 3])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
