"""Writer of Megatron's legacy checkpoints: the parts that its loop resumes from, for any mesh.

For ``remesh ckpt convert --to megatron-legacy``, the reverse of `megatron_legacy`, whose terms and rules it uses.

1. Every tensor of the checkpoint is one of the model, or a state of one. Names that no rule has, and all else that the
   parts have no place for, are reported at once, before a byte is written.
2. Layers are dealt out evenly over the chunks. A part holds its cut of each tensor, read from the files alone: one
   part at a time is in memory.
3. States of the optimizer stand under numbers, which follow the parameters in the order in which Megatron makes them:
   `_ORDER`. Groups keep the order and the options that the checkpoint has.
"""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError, CheckpointPathError
from remesh.checkpoint.foreign.megatron_legacy import (
    EMBEDDING,
    FILE,
    GPT_RULES,
    HEAD,
    MASTER,
    RENAMED,
    HowCut,
    cut_of,
    kind_of,
    kinds_of,
)
from remesh.checkpoint.formats.inert_objects import without_stand_ins
from remesh.checkpoint.run.reader import OpenCheckpoint
from remesh.checkpoint.run.stored_values import read_box
from remesh.foundation.errors import ConfigError
from remesh.foundation.files import flush, replace_whole
from remesh.layout import Box
from remesh.layout.from_torch import torch_dtype

_STATE = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param)\.(.+)")
_STACK = "decoder.layers."
_ORDER = (
    *("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings"),
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv.layer_norm"),
    *("self_attention.linear_qkv", "self_attention.q_layernorm", "self_attention.k_layernorm"),
    *("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm", "mlp.linear_fc1", "mlp.linear_fc2"),
    *("decoder.final_layernorm", "output_layer"),
)
"""The beginnings of names in the order in which Megatron Core makes its modules, those of a layer without the layer."""
_UNEVEN = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


@dataclass(frozen=True, slots=True)
class LegacyMesh:
    """The mesh of ranks for which parts are written."""

    tensor: int
    pipeline: int
    virtual: int = 1
    """Chunks of the model on each rank of the pipeline."""


@dataclass(frozen=True, slots=True)
class _LegacyChunk:
    """A piece of the model."""

    first_layer: int
    num_layers: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Writing:
    """What all parts of one conversion are written from."""

    source: OpenCheckpoint
    args: Namespace
    mesh: LegacyMesh
    rules: Sequence[tuple[str, HowCut]]
    num_layers: int
    kinds: frozenset[str]
    """The kinds of states that every parameter has."""

    @property
    def is_gated(self) -> bool:
        return bool(getattr(self.args, "swiglu", False) or getattr(self.args, "gated_linear_unit", False))

    @property
    def is_tied(self) -> bool:
        return not getattr(self.args, "untie_embeddings_and_output_weights", False)

    def chunks_of(self, stage: int) -> list[_LegacyChunk]:
        mesh = self.mesh
        size = self.num_layers // (mesh.pipeline * mesh.virtual)
        numbers = [virtual * mesh.pipeline + stage for virtual in range(mesh.virtual)]
        last = mesh.pipeline * mesh.virtual - 1
        return [_LegacyChunk(number * size, size, number == 0, number == last) for number in numbers]


def saved_mesh(source: OpenCheckpoint) -> LegacyMesh:
    """The mesh on which the checkpoint was saved, by the arguments in it."""
    args = _args_of(source)
    return LegacyMesh(
        int(getattr(args, "tensor_model_parallel_size", 1)),
        int(getattr(args, "pipeline_model_parallel_size", 1)),
        int(getattr(args, "virtual_pipeline_model_parallel_size", None) or 1),
    )


def write_megatron_legacy(
    source: OpenCheckpoint, target: Path, mesh: LegacyMesh, rules: Sequence[tuple[str, HowCut]] = GPT_RULES
) -> Path:
    """Write the folder of the iteration, and ``latest_checkpointed_iteration.txt`` in ``target`` last.

    The source is a checkpoint of Megatron's new kind, ``torch_dist``. Raises `CheckpointMismatchError` for what the
    parts have no place for, `ConfigError` for names without a rule and sizes that the mesh does not divide.
    """
    plan = _plan(source, mesh, rules)
    iteration = int(source.common["iteration"])
    place = target / f"iter_{iteration:07d}"
    if place.exists():
        raise CheckpointPathError(f"writing a checkpoint of Megatron: {place} is there; give a new folder")
    fresh = target / f".{place.name}.part"
    shutil.rmtree(fresh, ignore_errors=True)
    for rank in range(mesh.tensor):
        for stage in range(mesh.pipeline):
            folder = fresh / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if mesh.pipeline > 1 else ""))
            folder.mkdir(parents=True)
            torch.save(_part_of(plan, rank, stage), folder / FILE)
            flush(folder / FILE)
            flush(folder)
    flush(fresh)
    fresh.replace(place)
    replace_whole(target / "latest_checkpointed_iteration.txt", str(iteration).encode(), mode=0o644)
    return place


def _plan(source: OpenCheckpoint, mesh: LegacyMesh, rules: Sequence[tuple[str, HowCut]]) -> _Writing:
    args = _args_of(source)
    tensors = source.manifest.tensors
    stacked = [stored.global_shape[0] for name, stored in tensors.items() if name.startswith(_STACK)]
    num_layers = max(stacked, default=0)
    kinds = frozenset(match[1] for match in map(_STATE.fullmatch, tensors) if match)
    plan = _Writing(source, args, mesh, rules, num_layers, kinds)
    if uneven := [name for name in _UNEVEN if getattr(args, name, None)]:
        raise _bad(
            source, f"layers that are dealt out unevenly ({', '.join(uneven)}), expected the same for each chunk"
        )
    if num_layers % (mesh.pipeline * mesh.virtual):
        raise ConfigError(
            f"writing {source.directory} for Megatron: {num_layers} layers on {mesh.pipeline} ranks with "
            f"{mesh.virtual} chunks each, expected the same number in each chunk; give another --pipeline-parallel"
        )
    _check_names(plan)
    _check_values(plan)
    return plan


def _check_names(plan: _Writing) -> None:
    """Raise for tensors that are neither the model's nor states of one, and for those without a state or a rule."""
    tensors, source = plan.source.manifest.tensors, plan.source
    model = [name for name in tensors if not name.startswith("optimizer.")]
    wanted = {f"optimizer.state.{kind}.{name}" for kind in plan.kinds for name in model}
    halves = {name for name in model if torch_dtype(tensors[name].dtype) in (torch.bfloat16, torch.float16)}
    wanted -= {f"optimizer.state.{MASTER}.{name}" for name in model if name not in halves}
    held = {name for name in tensors if name.startswith("optimizer.")}
    if wanted != held:
        strange = "\n  ".join(sorted(wanted ^ held))
        raise _bad(source, f"states that not every parameter has, expected the same kinds of each:\n  {strange}")
    unknown = [name for name in model if not cut_of(plan.rules, name) or _order_of(_module_name(plan, name)) is None]
    layers = {name: tensors[name].global_shape[0] for name in model if name.startswith(_STACK)}
    odd = [name for name, count in layers.items() if count != plan.num_layers or name[len(_STACK)].isdigit()]
    if unknown or odd:
        raise ConfigError(
            f"writing {source.directory} for Megatron: no rule covers how {len(unknown) + len(odd)} tensors are cut, "
            "expected one for each, and layers that are stacked:\n  " + "\n  ".join([*unknown, *odd])
        )


def _check_values(plan: _Writing) -> None:
    common = plan.source.common
    if getattr(plan.args, "expert_model_parallel_size", 1) > 1 or getattr(plan.args, "num_experts", None):
        raise _bad(plan.source, "experts, expected a model without")
    optimizer = common.get("optimizer", {})
    if strange := sorted(map(str, optimizer.keys() - {"optimizer", "grad_scaler", "state", "param_groups"})):
        raise _bad(plan.source, f"an optimizer with {strange}, expected one that is not distributed and not chained")
    mesh = plan.mesh
    for name, stored in plan.source.manifest.tensors.items():
        match = _STATE.fullmatch(name)
        cut = cut_of(plan.rules, match[2] if match else name)
        shape = stored.global_shape[int(_STACK in name) :]
        parts = mesh.tensor * (2 if cut is HowCut.GATED and plan.is_gated else 1)
        if cut is not HowCut.WHOLE and shape[int(cut is HowCut.COLUMNS)] % parts:
            raise ConfigError(
                f"writing {plan.source.directory} for Megatron: tensor {name!r} of shape {shape} does not divide by "
                f"{mesh.tensor} ranks; give another --tensor-parallel"
            )


def _order_of(module_name: str) -> int | None:
    """The place of a parameter in the order in which Megatron makes modules."""
    return next((at for at, start in enumerate(_ORDER) if module_name.startswith((f"{start}.", f"{start}_"))), None)


def _module_name(plan: _Writing, name: str) -> str:
    """The name of a tensor in the model's modules; in a layer, the name without the layer."""
    short = name.removeprefix(_STACK)
    if name.startswith(_STACK) and getattr(plan.args, "transformer_impl", "local") == "local":
        for local, stored in RENAMED:
            short = short.replace(stored, local) if short.startswith(stored) else short
    return short


def _part_of(plan: _Writing, rank: int, stage: int) -> dict[str, Any]:
    """All that the file of one rank holds."""
    common = plan.source.common
    args = Namespace(**vars(plan.args))
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = plan.mesh.tensor, plan.mesh.pipeline
    args.virtual_pipeline_model_parallel_size = plan.mesh.virtual if plan.mesh.virtual > 1 else None
    left = ("args", "optimizer", "content_metadata", "rng_state", "rerun_state_machine")
    rest = {key: value for key, value in common.items() if key not in left}
    part: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, **without_stand_ins(rest)}
    parameters: list[tuple[str, int | None]] = []
    for at, chunk in enumerate(plan.chunks_of(stage)):
        names = _names_in(plan, chunk)
        part["model" if plan.mesh.virtual == 1 else f"model{at}"] = {
            _local_name(plan, name, layer, chunk): _read(plan, name, layer, rank) for name, layer in names
        } | _extra_states(plan, chunk)
        parameters += names
    if "optimizer" in common:
        part["optimizer"] = _optimizer_of(plan, parameters, rank)
    return part


def _names_in(plan: _Writing, chunk: _LegacyChunk) -> list[tuple[str, int | None]]:
    """Stored names and numbers of layers of a chunk's parameters, in the order in which Megatron makes them."""
    model = [name for name in plan.source.manifest.tensors if not name.startswith("optimizer.")]
    model.sort(key=lambda name: (_order_of(_module_name(plan, name)) or 0, not name.endswith("weight")))
    begin = [(name, None) for name in model if name.startswith("embedding.") and chunk.is_first]
    end = [(name, None) for name in model if not name.startswith(("embedding.", _STACK)) and chunk.is_last]
    if chunk.is_last and not chunk.is_first and plan.is_tied:
        end.append((EMBEDDING, None))
    layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
    return [*begin, *((name, layer) for layer in layers for name in model if name.startswith(_STACK)), *end]


def _local_name(plan: _Writing, name: str, layer: int | None, chunk: _LegacyChunk) -> str:
    """The name in the part; the embedding's second place is the head."""
    if layer is None:
        return HEAD if name == EMBEDDING and not chunk.is_first else name
    return f"{_STACK}{layer - chunk.first_layer}.{_module_name(plan, name)}"


def _extra_states(plan: _Writing, chunk: _LegacyChunk) -> dict[str, None]:
    """Names under which Megatron's modules keep values that are no tensors; here they hold nothing."""
    found: dict[str, None] = {}
    for unique_key in plan.source.manifest.objects:
        name = unique_key.split("/")[0]
        if name.startswith(_STACK) and name.endswith("._extra_state"):
            found |= {f"{_STACK}{at}.{name.removeprefix(_STACK)}": None for at in range(chunk.num_layers)}
    return found


def _read(plan: _Writing, name: str, layer: int | None, rank: int, kind: str = "") -> torch.Tensor:
    """A rank's cut of a tensor, or of a state of one."""
    cut, size = cut_of(plan.rules, name), plan.mesh.tensor
    key = f"optimizer.state.{kind}.{name}" if kind else name
    shape = plan.source.manifest.tensors[key].global_shape[int(layer is not None) :]

    def read(dim: int, start: int, length: int) -> torch.Tensor:
        begin, extent = [0] * len(shape), list(shape)
        if shape:
            begin[dim], extent[dim] = start, length
        if layer is None:
            return read_box(plan.source, key, Box.at(tuple(begin), tuple(extent)))
        return read_box(plan.source, key, Box.at((layer, *begin), (1, *extent)))[0]

    if cut is HowCut.WHOLE:
        return read(0, 0, shape[0])
    dim = int(cut is HowCut.COLUMNS)
    if cut is HowCut.GATED and plan.is_gated:
        half = shape[0] // 2
        return torch.cat([read(0, start + rank * half // size, half // size) for start in (0, half)])
    return read(dim, rank * shape[dim] // size, shape[dim] // size)


def _optimizer_of(plan: _Writing, parameters: Sequence[tuple[str, int | None]], rank: int) -> dict[str, Any]:
    """The optimizer's state in a part: states by number, groups, and the master values of half-precision parameters."""
    stored = plan.source.common["optimizer"]
    inner = stored.get("optimizer", stored)
    groups = without_stand_ins(inner["param_groups"])
    kinds = kinds_of(groups)
    steps = inner.get("state", {}).get("common_step")
    state: dict[int, dict[str, Any]] = {}
    masters: list[list[torch.Tensor]] = []
    for group, kind in zip(groups, kinds, strict=True):
        members = [(name, layer) for name, layer in parameters if _kind_here(plan, name, layer, kinds) == kind]
        group["params"] = list(range(len(state), len(state) + len(members)))
        for name, layer in members:
            held = {one: _read(plan, name, layer, rank, one) for one in sorted(plan.kinds - {MASTER})}
            step = None if steps is None else torch.tensor(float(steps), dtype=torch.float32, device="cpu")
            state[len(state)] = held | ({} if step is None else {"step": step})
        masters.append([_read(plan, *one, rank, MASTER) for one in members if _has_master(plan, one[0])])
    if len(state) != len(parameters) or len(set(kinds)) != len(kinds):
        raise _bad(
            plan.source,
            f"groups {kinds} (has it weight decay, has it a rate of its own), expected one of each kind that "
            "parameters have; groups of a program's own are not known here",
        )
    made = {"state": state, "param_groups": groups}
    if inner is stored:
        return made
    others = {key: value for key, value in stored.items() if key != "optimizer"}
    return {"optimizer": made, "fp32_from_fp16_params": masters, **without_stand_ins(others)}


def _has_master(plan: _Writing, name: str) -> bool:
    return f"optimizer.state.{MASTER}.{name}" in plan.source.manifest.tensors


def _kind_here(plan: _Writing, name: str, layer: int | None, kinds: Sequence[tuple[bool, bool]]) -> tuple[bool, bool]:
    num_dims = len(plan.source.manifest.tensors[name].global_shape) - int(layer is not None)
    return kind_of(name, num_dims, any(has_own for _, has_own in kinds))


def _args_of(source: OpenCheckpoint) -> Namespace:
    args = source.common.get("args")
    if not isinstance(args, Namespace) or "iteration" not in source.common:
        raise _bad(
            source, "no arguments of the program and no iteration, expected a checkpoint of Megatron's torch_dist"
        )
    kept: Namespace = without_stand_ins(args)
    return kept


def _bad(source: OpenCheckpoint, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(f"writing {source.directory} as a checkpoint of Megatron's old kind: found {found}")
