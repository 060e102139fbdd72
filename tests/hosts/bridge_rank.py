"""One rank of Megatron-Bridge's own training loop, on CPUs, with either package in the place of Megatron's checkpoints.

    bridge_rank.py PACKAGE HELD LOAD SAVE INTERVAL TENSOR_PARALLEL PIPELINE_PARALLEL UNTIL_STEP

Under torchrun. The loop is ``megatron.bridge.training.pretrain``, the configuration its recipe of a plain GPT, made
small, in bf16 with master values; the manager of checkpoints is the one that its factory makes. Data are a provider of
ours. The last rank never begins to save the checkpoint HELD, and leaves a file ``held`` beside it. What Bridge imports
and has no part in this is left out by name: packages that are built for CUDA, its adapters, its data sets and its
models of other kinds.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.interop.training_rank import OnCpu, imitate_a_gpu

_SEQUENCE, _VOCABULARY = 16, 64
_LEFT_OUT = (
    *("modelopt", "nvidia_resiliency_ext", "flash_attn", "mistral_common", "wandb", "megatron.bridge.peft"),
    *("megatron.bridge.models.megatron_mimo", "megatron.bridge.data.megatron_mimo", "megatron.bridge.data.builders"),
    *("megatron.bridge.data.datasets.fim_dataset", "megatron.bridge.data.sources"),
)
_BARE: dict[str, dict[str, str]] = {
    "megatron.bridge": {},
    "megatron.bridge.data": {},
    "megatron.bridge.recipes": {},
    "megatron.bridge.models": {"GPTModelProvider": "gpt_provider", "T5ModelProvider": "t5_provider"},
    "megatron.bridge.models.conversion": {},
    "megatron.bridge.models.hf_pretrained": {},
}
"""Packages that are found without what they import: of their names those in modules that are wanted here."""


class _Empty(types.ModuleType):
    """A module whose names are all classes with nothing in them."""

    __path__: list[str] = []  # noqa: RUF012 - as modules have it

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)  # type: ignore[no-any-return]


class _Bare(types.ModuleType):
    """A package of Bridge without the lists of its own."""

    def __getattr__(self, name: str) -> Any:
        if name not in _BARE[self.__name__]:
            raise AttributeError(name)
        return getattr(importlib.import_module(f"{self.__name__}.{_BARE[self.__name__][name]}"), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module where one is asked for that is left out, and the bare packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_left_out = any(name == one or name.startswith(f"{one}.") for one in _LEFT_OUT)
        if not is_left_out and name not in _BARE:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        real = importlib.machinery.PathFinder.find_spec(name, path)
        if not is_left_out and real is not None:
            spec.submodule_search_locations = real.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return (_Bare if spec.name in _BARE else _Empty)(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: names come when they are asked for."""


class Tokens(torch.utils.data.Dataset):
    """Random texts, the same in every run."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, _VOCABULARY, (_SEQUENCE + 1,), generator=torch.Generator().manual_seed(at))
        rest = {"loss_mask": torch.ones(_SEQUENCE), "position_ids": torch.arange(_SEQUENCE)}
        return {"tokens": tokens[:-1], "labels": tokens[1:], **rest}


def _data() -> Any:
    """Bridge's own way for data that a user makes."""
    base: Any = importlib.import_module("megatron.bridge.data.base")

    class Provider(base.DatasetProvider):  # type: ignore[misc]
        seq_length = _SEQUENCE
        random_seed = 0
        skip_getting_attention_mask_from_dataset = True

        def build_datasets(self, context: Any) -> tuple[Any, None, None]:
            return Tokens(context.train_samples + 6), None, None  # there is a batch more than is trained with

    return Provider(dataloader_type="single", num_workers=0)


def _config(load: str, save: str, *numbers: int) -> Any:
    interval, tensor_parallel, pipeline_parallel, until = numbers
    recipe: Any = importlib.import_module("megatron.bridge.recipes.gpt.h100.vanilla_gpt")
    config = recipe.vanilla_gpt_pretrain_1gpu_h100_bf16_config()
    model = config.model
    model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length = 2, 32, 4, _SEQUENCE
    model.tensor_model_parallel_size, model.pipeline_model_parallel_size = tensor_parallel, pipeline_parallel
    model.transformer_layer_spec = importlib.import_module("megatron.bridge.models.gpt_provider").local_layer_spec
    model.gradient_accumulation_fusion = False
    # On a CPU its random numbers are the loader's, too, which draws a seed when it begins: at a resume once more.
    model.hidden_dropout = model.attention_dropout = 0.0
    config.dataset, config.tokenizer.vocab_size = _data(), _VOCABULARY - 1
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = until, 6, 1
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 1, 100
    config.validation.eval_iters = 0
    checkpoint = config.checkpoint
    checkpoint.load, checkpoint.save, checkpoint.save_interval = load, save, interval
    config.dist.distributed_backend = "gloo"
    config.optimizer.use_distributed_optimizer = False
    config.logger.tensorboard_dir, config.logger.log_interval = None, 1
    return config


def hold(core: Any, held: str) -> None:
    """Have the last rank stand before a save of which the others are a part."""
    save = core.save

    def save_or_stand(state: Any, place: str, *args: Any, **options: Any) -> Any:
        if Path(place).name == held and dist.get_rank() == dist.get_world_size() - 1:
            Path(place).with_name("held").touch()
            time.sleep(600)  # it is killed before
        return save(state, place, *args, **options)

    core.save = save_or_stand


def main(package: str, held: str, load: str, save: str, *numbers: str) -> None:
    imitate_a_gpu()
    if package == "remesh":
        importlib.import_module("remesh.integrations.megatron_core").put_in_place()
    # Imported before Bridge, since it goes without what is left out below.
    hold(importlib.import_module("megatron.core.dist_checkpointing"), held)
    sys.meta_path.insert(0, _Finder())
    importlib.import_module("megatron.core.parallel_state").get_nccl_options = lambda *_: None  # type: ignore[attr-defined]
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None  # type: ignore[attr-defined]
    pretrain: Any = importlib.import_module("megatron.bridge.training.pretrain")
    step: Any = importlib.import_module("megatron.bridge.training.gpt_step")
    # What modelopt answers where no model is distilled or quantised.
    train: Any = importlib.import_module("megatron.bridge.training.train")
    train.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    importlib.import_module("megatron.bridge.training.checkpointing").save_sharded_modelopt_state = lambda *_: None  # type: ignore[attr-defined]
    with OnCpu():
        pretrain.pretrain(_config(load, save, *map(int, numbers)), step.forward_step)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
