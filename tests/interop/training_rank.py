"""One rank of Megatron's own training loop, on CPUs, with either package in the place of its checkpoints.

    training_rank.py PACKAGE FORMAT MODE DIRECTORY RANK SIZE TENSOR_PARALLEL PIPELINE_PARALLEL UNTIL_STEP

A tiny GPT goes on from what is in the directory, or begins, and is saved at every second step. Of Megatron nothing
changes but where its tensors lie: what it asks of a GPU, the CPU gives. The last line has the losses of all steps.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import types
import typing
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

_SEQUENCE, _VOCABULARY = 16, 64
_MODEL = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {_SEQUENCE} --attention-dropout 0
  --max-position-embeddings {_SEQUENCE} --hidden-dropout 0 --transformer-impl local
  --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size {_VOCABULARY - 1}
  --make-vocab-size-divisible-by 1 --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
  --no-gradient-accumulation-fusion
  --no-persist-layer-norm --no-rope-fusion"""
_TRAINING = """--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --clip-grad 0 --lr-decay-iters 100 --eval-iters 0
  --eval-interval 1000 --log-interval 1 --num-workers 0 --distributed-backend gloo --save-interval 2
  --ckpt-assume-constant-structure --override-opt_param-scheduler --async-strategy mcore"""
_OF_FORMAT = {
    "torch_dist": "--use-cpu-initialization --load {directory}",
    "torch_dcp": "--use-torch-fsdp2",
    "torch": "--use-cpu-initialization --load {directory}",
}
_OF_MODE = {"async": "--async-save --use-persistent-ckpt-worker", "sync": "", "without-rng": "--no-load-rng"}


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:  # which optimizers of half precision ask
            return function(*args).replace("torch.", "torch.cuda.")
        named = {name: _on_cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        return function(*(map(_on_cpu, args) if function is torch.Tensor.to else args), **named)


def _on_cpu(device: Any) -> Any:
    is_gpu = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return "cpu" if is_gpu or type(device) is int else device


def imitate_a_gpu() -> None:
    """Answer what Megatron asks of ``torch.cuda``, and let it be imported without a compiler of kernels."""
    importlib.import_module("torch._inductor.utils")  # which looks for the real one
    for name in ("triton", "triton.language"):
        sys.modules.setdefault(name, MagicMock(__version__="3.5.0"))
    torch.compile = lambda one=None, **_: one if one is not None else lambda given: given  # type: ignore[assignment]
    typing.override = lambda one: one  # type: ignore[attr-defined]  # which some releases want of a later Python
    cuda: Any = torch.cuda
    nothing = type("Nothing", (MagicMock,), {})
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "nvtx", "_lazy_init"):
        setattr(cuda, name, MagicMock(return_value=None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
        module.manual_seed = torch.manual_seed
    cuda.is_available = lambda: sys._getframe(1).f_globals["__name__"].startswith("megatron.")
    cuda.current_device, cuda.device_count = lambda: "cpu", lambda: 1
    cuda.get_device_properties = lambda _: MagicMock(major=9, minor=0)
    cuda.default_generators = {"cpu": torch.default_generator}
    cuda.Stream = cuda.Event = nothing
    cuda.current_stream, cuda.stream = lambda *_: nothing(), lambda _: nullcontext()
    cuda.FloatTensor, cuda.HalfTensor, cuda.BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    cuda._lazy_call = lambda call, **_: call()


def prepare_megatron() -> types.ModuleType:
    """``megatron.training``, with what it does on GPUs only done on the CPU."""
    training = importlib.import_module("megatron.training")
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
    importlib.import_module("megatron.core.parallel_state").get_nccl_options = lambda *_: None
    mesh: Any = importlib.import_module("torch.distributed.device_mesh").DeviceMesh
    from_group = mesh.from_group
    mesh.from_group = staticmethod(lambda group, _, *args, **options: from_group(group, "cpu", *args, **options))
    return training


class Program:
    """What a user of Megatron writes: a model, data and a step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def model(self, pre_process: bool = True, post_process: bool = True, *_: Any, **__: Any) -> Any:
        gpt = importlib.import_module("megatron.core.models.gpt")
        specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        arguments = importlib.import_module("megatron.training.arguments")
        config = arguments.core_transformer_config_from_args(importlib.import_module("megatron.training").get_args())
        spec, ends = specs.get_gpt_layer_local_spec(), {"pre_process": pre_process, "post_process": post_process}
        return gpt.GPTModel(config, spec, _VOCABULARY, _SEQUENCE, share_embeddings_and_output_weights=False, **ends)

    def data(self, numbers: Sequence[int]) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        return [
            [{"tokens": torch.randint(0, _VOCABULARY, (_SEQUENCE + 1,), generator=generator)} for _ in range(number)]
            or None
            for number in numbers
        ]

    def step(self, data: Any, model: Any, *_: Any) -> Any:
        tokens = next(data)["tokens"]
        position = torch.arange(_SEQUENCE).expand(tokens.shape[0], -1)
        mask = torch.triu(torch.ones(_SEQUENCE, _SEQUENCE, dtype=torch.bool), 1)[None, None]
        return model(tokens[:, :-1].contiguous(), position, mask, labels=tokens[:, 1:].contiguous()), self._take_loss

    def _take_loss(self, output: torch.Tensor) -> Any:
        loss = output.float().mean()
        self.losses.append(loss.item())
        return loss, torch.tensor(1), {"lm loss": torch.stack([loss.detach(), torch.tensor(1.0)])}


def train(training: Any, program: Program) -> None:
    """Call ``pretrain`` as the release wants it."""
    given = {}
    if "cfg_container" in inspect.signature(training.pretrain).parameters:
        args = importlib.import_module("megatron.training.arguments").parse_and_validate_args()
        container = importlib.import_module("megatron.training.argument_utils").pretrain_cfg_container_from_args
        given["cfg_container"] = container(args)

    def datasets(numbers: Sequence[int]) -> list[Any]:
        return program.data(numbers)

    datasets.is_distributed = True  # type: ignore[attr-defined]
    training.pretrain(
        **given,
        train_valid_test_dataset_provider=datasets,
        model_provider=program.model,
        model_type=importlib.import_module("megatron.core.enums").ModelType.encoder_or_decoder,
        forward_step_func=program.step,
    )


def main(package: str, format_: str, mode: str, directory: str, *numbers: str) -> None:
    rank, size, tensor_parallel, pipeline_parallel, until = numbers
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    if format_ != "torch_dcp":  # and FSDP wants more than one
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    of_run = f"--save {directory} --ckpt-format {format_} --train-iters {until}"
    of_mesh = f"--tensor-model-parallel-size {tensor_parallel} --pipeline-model-parallel-size {pipeline_parallel}"
    options = [_MODEL, _TRAINING, of_run, of_mesh, _OF_FORMAT[format_], _OF_MODE[mode]]
    sys.argv = ["train", *" ".join(options).format(directory=directory).split()]
    imitate_a_gpu()
    if package == "remesh":
        importlib.import_module("remesh.integrations.megatron_core").put_in_place()
    program = Program()
    with OnCpu():
        train(prepare_megatron(), program)
    Path(f"{directory}-losses-{rank}.json").write_text(json.dumps(program.losses))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
