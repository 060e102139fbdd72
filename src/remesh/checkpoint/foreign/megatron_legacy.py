"""Reader of Megatron's legacy checkpoints: whole tensors, under the names of its current format.

For ``remesh ckpt convert --from megatron-legacy``. Definitions. A *part* is the file of one rank of tensor and pipeline
parallelism, ``mp_rank_TT[_PPP]/model_optim_rng.pt``. A *chunk* is a piece of the model on one rank of the pipeline;
with virtual stages there are several, and chunk v of rank p comes v * (ranks) + p in the order of layers.

1. Parts are read by ``torch.load(weights_only=True)``; objects of Megatron's own classes become stand-ins.
2. Layers are numbered through all chunks, by what these hold; a `HowCut` describes how the ranks' parts of a tensor
   make it whole. Names that no rule has are reported all at once.
3. States of the optimizer stand under numbers. They follow the parameters of a part in their order, group by group:
   those with weight decay, those without. Every shape must fit.
4. Layers are stacked, as Megatron Core's ``torch_dist`` has them, so Megatron reads the result for any parallelism.
"""

from __future__ import annotations

import io
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointPathError
from remesh.checkpoint.foreign.torch_files import read_torch_file
from remesh.checkpoint.formats.inert_objects import without_stand_ins
from remesh.checkpoint.run.writer import RankState, begin_save, commit_save, store_entities
from remesh.checkpoint.storage import Location
from remesh.checkpoint.values.entities import ShardedBase, ShardedObject, ShardedTensor
from remesh.comm.agreement import Agreements
from remesh.foundation.errors import ConfigError

FILE = "model_optim_rng.pt"
_OWN = ("megatron.", "signal.Signals")
_LEFT_OUT = ("rng_state", "rerun_state_machine", "args", "optimizer")
_CHUNK = re.compile(r"model\d*")
_LAYER = re.compile(r"(decoder\.layers)\.(\d+)\.(.+)")
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MASTER = "fp32_param"
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""Metadata that Megatron wants: layers are stacked, and states are under the names of their parameters."""
_ByKind = dict[str, dict[str, torch.Tensor]]


class HowCut(Enum):
    """How the parts of a tensor on the ranks of tensor parallelism make the whole."""

    WHOLE = "whole"
    """Every rank has all of it."""
    ROWS = "rows"
    COLUMNS = "columns"
    GATED = "gated"
    """Rows; in a gated network each rank has its rows of the gate, and then its rows of the other half."""


GPT_RULES: tuple[tuple[str, HowCut], ...] = (
    (r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)", HowCut.ROWS),
    (r"embedding\.(position|tokentype)_embeddings\.weight", HowCut.WHOLE),
    (r".*\.linear_qkv\.(weight|bias)", HowCut.ROWS),
    (r".*\.mlp\.linear_fc1\.(weight|bias)", HowCut.GATED),
    (r".*\.(linear_proj|linear_fc2)\.weight", HowCut.COLUMNS),
    (r".*\.(linear_proj|linear_fc2)\.bias", HowCut.WHOLE),
    (r".*layer_?norm(_weight|_bias|\.weight|\.bias)", HowCut.WHOLE),
)
"""Rules for Megatron Core's GPT without experts: pattern of a whole name, and how the tensor is cut."""

RENAMED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""The names of local modules, and those that all kinds of modules have in ``torch_dist``."""


def cut_of(rules: Sequence[tuple[str, HowCut]], name: str) -> HowCut | None:
    """How a tensor of the model is cut; None if no rule has its name."""
    return next((cut for pattern, cut in rules if re.fullmatch(pattern, name)), None)


def kind_of(name: str, num_dims: int, has_rates: bool) -> tuple[bool, bool]:
    """The group that Megatron puts a parameter into: whether it has weight decay, and a learning rate of its own."""
    return num_dims > 1 and not name.endswith(".bias"), has_rates and name in (EMBEDDING, HEAD)


def kinds_of(groups: Sequence[Mapping[str, Any]]) -> list[tuple[bool, bool]]:
    """The kinds of the groups that a checkpoint has."""
    return [
        (bool(group.get("wd_mult", group.get("weight_decay"))), bool(group.get("is_decoupled_lr"))) for group in groups
    ]


@dataclass
class _Merged:
    """Whole tensors, by kind (empty for the model itself) and global name."""

    rules: Sequence[tuple[str, HowCut]]
    is_gated: bool
    by_kind: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def add(self, of_ranks: Sequence[_ByKind], place: Path) -> None:
        """Put together the parts of one stage that the ranks of tensor parallelism have."""
        if any(_names_in(one) != _names_in(of_ranks[0]) for one in of_ranks):
            raise _bad(place, "ranks of tensor parallelism that have other tensors, expected the same names on all")
        for kind, tensors in of_ranks[0].items():
            whole = self.by_kind.setdefault(kind, {})
            for name in tensors:
                cut = cut_of(self.rules, name)
                if cut is None:
                    self.unknown.extend([name] if name not in self.unknown else [])
                elif name in whole:
                    raise _bad(place, f"tensor {name!r} on two stages of the pipeline, expected it on one")
                else:
                    whole[name] = self._join([one[kind][name] for one in of_ranks], cut, name, place)

    def _join(self, parts: Sequence[torch.Tensor], cut: HowCut, name: str, place: Path) -> torch.Tensor:
        if cut is HowCut.WHOLE:
            if not all(part.equal(parts[0]) for part in parts):
                raise _bad(place, f"tensor {name!r} with other values on other ranks, expected the same on all")
            return parts[0]
        if cut is HowCut.GATED and self.is_gated:
            return torch.cat(
                [half for halves in zip(*(part.chunk(2) for part in parts), strict=True) for half in halves]
            )
        return torch.cat(list(parts), int(cut is HowCut.COLUMNS))


def read_megatron_legacy(folder: Path, rules: Sequence[tuple[str, HowCut]] = GPT_RULES) -> dict[str, Any]:
    """The state of an iteration's folder, or of the newest iteration in a folder.

    Raises `CheckpointFormatError` for what is wrong in the files, `ConfigError` for names without a rule.
    """
    place = _iteration_in(folder)
    parts = _parts_of(place)
    args = parts[0][0]["args"]
    merged = _Merged(rules, bool(getattr(args, "swiglu", False) or getattr(args, "gated_linear_unit", False)))
    steps: set[float] = set()
    for stage, first_layers in enumerate(_first_layers(parts[0])):
        merged.add([_tensors_of(of_rank[stage], first_layers, steps, place) for of_rank in parts], place)
    if merged.unknown:
        raise ConfigError(
            f"reading {place}: no rule covers how {len(merged.unknown)} tensors are cut, expected one for each; give "
            "read_megatron_legacy rules of your own before GPT_RULES:\n  " + "\n  ".join(merged.unknown)
        )
    if not getattr(args, "untie_embeddings_and_output_weights", False):
        _drop_tied_head(merged.by_kind, place)
    state: dict[str, Any] = {}
    for kind, tensors in merged.by_kind.items():
        prefix = f"optimizer.state.{kind}." if kind else ""
        state |= {prefix + name: tensor for name, tensor in _stacked(tensors, place).items()}
    num_layers = sum(len(_layers_of(part[key])) for part in parts[0] for key in _chunks_of(part))
    for key in {key for part in parts[0] for key in _extra_states(part)}:
        # Megatron looks for one of each layer, be there anything in it or not.
        objects = [ShardedObject(key, None, (num_layers,), (at,)) for at in range(num_layers)]
        state |= {one.unique_key: one for one in objects}
    return {**state, **_common_of(parts[0][0], steps, place)}


def save_megatron(state: Mapping[str, Any], target: Location) -> None:
    """Write what `read_megatron_legacy` returns as one checkpoint, which Megatron and `remesh.load` read."""
    plans, common = Agreements(), {}
    entities: list[ShardedBase] = []
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            entities.append(ShardedTensor.from_rank_offsets(name, value.contiguous()))
        elif isinstance(value, ShardedObject):
            entities.append(value)
        else:
            common[name] = value
    lock = begin_save(lambda: RankState(entities, common), target, plans, may_create=True).lock
    store_entities(entities, lock, plans)
    commit_save(lock)


def _iteration_in(folder: Path) -> Path:
    tracker = folder / "latest_checkpointed_iteration.txt"
    place = folder
    if tracker.is_file():
        text = tracker.read_text().strip()
        place = folder / (f"iter_{int(text):07d}" if text.isdigit() else "release")
    if not any(place.glob(f"mp_rank_*/{FILE}")):
        raise CheckpointPathError(
            f"reading a checkpoint of Megatron: no mp_rank_*/{FILE} in {place}; give the folder of an iteration, or "
            "the one above"
        )
    return place


def _parts_of(place: Path) -> list[list[dict[str, Any]]]:
    """The contents of the files: rank of tensor parallelism -> rank of the pipeline -> part."""
    if any(place.glob("mp_rank_*/distrib_optim.pt")):
        raise _bad(
            place,
            "a distributed optimizer (distrib_optim.pt), whose buffers have no names, expected one of each rank; let "
            "Megatron convert it: --ckpt-convert-format torch_dist",
        )
    found = {path.parent.name: read_torch_file(path, "Megatron", _OWN) for path in sorted(place.glob(f"*/{FILE}"))}
    first = next(iter(found.values()))
    args = first.get("args")
    if not isinstance(args, Namespace) or float(first.get("checkpoint_version", 0)) < 3:
        raise _bad(place, f"version {first.get('checkpoint_version', 0)}, expected 3.0 with the program's arguments")
    sizes = [int(getattr(args, f"{axis}_model_parallel_size", 1)) for axis in ("tensor", "pipeline", "expert")]
    num_tensor, num_stages, num_expert = sizes
    if num_expert > 1:
        raise _bad(place, f"{num_expert} ranks of expert parallelism, expected tensor and pipeline parallelism alone")
    names = [
        [f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if num_stages > 1 else "") for stage in range(num_stages)]
        for rank in range(num_tensor)
    ]
    expected = sorted(name for of_rank in names for name in of_rank)
    if sorted(found) != expected:
        raise _bad(place, f"folders {sorted(found)}, expected {expected}; copy all of them")
    return [[found[name] for name in of_rank] for of_rank in names]


def _first_layers(stages: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """For each stage: key of each chunk -> number of the first layer in it."""
    chunks = [_chunks_of(stage) for stage in stages]
    firsts: list[dict[str, int]] = [{} for _ in stages]
    count = 0
    for number in range(max(map(len, chunks))):
        for stage, keys in enumerate(chunks):
            firsts[stage][keys[number]] = count
            count += len(_layers_of(stages[stage][keys[number]]))
    return firsts


def _chunks_of(part: Mapping[str, Any]) -> list[str]:
    return sorted((key for key in part if _CHUNK.fullmatch(key)), key=lambda key: int(key.removeprefix("model") or 0))


def _layers_of(chunk: Mapping[str, Any]) -> set[str]:
    """Numbers of the layers in a chunk, as it counts them."""
    return {match[2] for match in map(_LAYER.fullmatch, chunk) if match}


def _extra_states(part: Mapping[str, Any]) -> Iterator[str]:
    """The names of a layer's states that are no tensors, as Megatron's new kind names them for all layers."""
    for key in _chunks_of(part):
        for match in map(_LAYER.fullmatch, part[key]):
            if match and match[3].endswith("._extra_state"):
                yield f"{match[1]}.{match[3]}"


def _tensors_of(part: Mapping[str, Any], first_layers: Mapping[str, int], steps: set[float], place: Path) -> _ByKind:
    """A part's parameters under global names, and what its optimizer has of them; its step is added to ``steps``."""
    parameters: dict[str, torch.Tensor] = {}
    for key, first in first_layers.items():
        for name, value in part[key].items():
            match = _LAYER.fullmatch(name)
            renamed = name if match is None else f"{match[1]}.{int(match[2]) + first}.{match[3]}"
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                parameters[renamed] = value
            elif not _is_empty(value):
                raise _bad(
                    place, f"{name!r} as a {type(value).__name__}, expected a tensor; scales of FP8 are not read"
                )
    found: _ByKind = {"": parameters}
    if "optimizer" in part:
        for kind, name, tensor in _states_of(part["optimizer"], parameters, steps, place):
            found.setdefault(kind, {})[name] = tensor
    return found


def _is_empty(value: Any) -> bool:
    """Whether a state of a module is empty: Transformer Engine saves one of each, of which old ones are files."""
    if isinstance(value, io.BytesIO):
        value = torch.load(value, weights_only=True)
    return value is None or (isinstance(value, torch.Tensor) and not value.numel())


def _states_of(
    optimizer: Any, parameters: Mapping[str, torch.Tensor], steps: set[float], place: Path
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Kind, name and value of every state."""
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
    if "state" not in inner or "param_groups" not in inner:
        raise _bad(place, "an optimizer without states of its own, or several chained, expected one of all parameters")
    masters = optimizer.get("fp32_from_fp16_params", [[] for _ in inner["param_groups"]])
    members = _members_of(inner["param_groups"], parameters, place)
    for group, names, of_group in zip(inner["param_groups"], members, masters, strict=True):
        halves = [name for name in names if parameters[name].dtype in (torch.float16, torch.bfloat16)]
        for name, tensor in zip(halves, of_group, strict=bool(of_group)):
            yield MASTER, name, _fitting(tensor, parameters[name], name, place)
        for number, name in zip(group["params"], names, strict=True):
            for kind, value in inner["state"].get(number, {}).items():
                if kind == "step":
                    steps.add(float(value))
                elif value is not None:
                    yield kind, name, _fitting(value, parameters[name], f"{kind} of {name}", place)


def _members_of(
    groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, torch.Tensor], place: Path
) -> list[list[str]]:
    """Names of the parameters of each group: Megatron parts them by weight decay, and by rates of their own."""
    kinds = kinds_of(groups)
    has_rates = any(has_own for _, has_own in kinds)
    found: dict[tuple[bool, bool], list[str]] = {kind: [] for kind in kinds}
    for name, tensor in parameters.items():
        found.setdefault(kind_of(name, tensor.ndim, has_rates), []).append(name)
    counts = [len(group["params"]) for group in groups]
    if len(found) != len(groups) or counts != [len(found[kind]) for kind in kinds]:
        raise _bad(
            place,
            f"groups of {counts} parameters, expected those with weight decay and those without "
            f"({[len(names) for names in found.values()]}); groups of a program's own are not known here",
        )
    return [found[kind] for kind in kinds]


def _fitting(value: Any, parameter: torch.Tensor, what: str, place: Path) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise _bad(place, f"{what} as {shape}, expected {tuple(parameter.shape)} as its parameter")
    return value


def _drop_tied_head(by_kind: _ByKind, place: Path) -> None:
    """Drop the last stage's copy of the embedding, which is stored once."""
    for kind, tensors in by_kind.items():
        head = tensors.pop(HEAD, None)
        if head is not None and not head.equal(tensors[EMBEDDING]):
            raise _bad(place, f"{kind or 'a tied head'} of {HEAD!r} that differs from that of the embedding")


def _stacked(tensors: Mapping[str, torch.Tensor], place: Path) -> dict[str, torch.Tensor]:
    """The same tensors, with those of all layers stacked into one."""
    found: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        short = match[3]
        for local, stored in RENAMED:
            short = short.replace(local, stored) if short.startswith(local) else short
        key = f"{match[1]}.{short}"
        layers.setdefault(key, {})[int(match[2])] = tensor
    num_layers = max((len(of_key) for of_key in layers.values()), default=0)
    for key, of_key in layers.items():
        if len(of_key) != num_layers or len({tensor.shape for tensor in of_key.values()}) > 1:
            raise _bad(
                place, f"{key!r} in {len(of_key)} of {num_layers} layers or of several shapes, expected all alike"
            )
        found[key] = torch.stack([of_key[number] for number in range(num_layers)])
    return found


def _common_of(part: Mapping[str, Any], steps: set[float], place: Path) -> dict[str, Any]:
    """The values that are no tensors, as Megatron's new kind has them; ranks' random numbers are left out."""
    if len(steps) > 1:
        raise _bad(place, f"parameters at steps {sorted(steps)}, expected one step of all")
    args = without_stand_ins(part["args"])
    args.no_save_rng = True
    rest = {key: value for key, value in part.items() if key not in _LEFT_OUT and not _CHUNK.fullmatch(key)}
    found = {"args": args, **without_stand_ins(rest), "content_metadata": _CONTENT}
    optimizer = part.get("optimizer")
    if optimizer is not None:
        inner = optimizer.get("optimizer", optimizer)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
        state = {"common_step": min(steps)} if steps else {}
        common = {"state": state, "param_groups": without_stand_ins(groups)}
        others = {key: value for key, value in optimizer.items() if key not in ("optimizer", "fp32_from_fp16_params")}
        found["optimizer"] = {"optimizer": common, **without_stand_ins(others)} if "optimizer" in optimizer else common
    return found


def _names_in(by_kind: _ByKind) -> dict[str, set[str]]:
    return {kind: set(tensors) for kind, tensors in by_kind.items()}


def _bad(place: Path, found: str) -> CheckpointFormatError:
    return CheckpointFormatError("bad-megatron", f"reading a checkpoint of Megatron at {place}: found {found}")
