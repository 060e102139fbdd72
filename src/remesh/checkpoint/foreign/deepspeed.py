"""Reader of DeepSpeed ZeRO checkpoints: a plain state, for ``remesh ckpt convert --from deepspeed-zero``.

Definitions. A *tag* is the folder of one checkpoint; the file ``latest`` beside it names the newest. Every rank of data
parallelism leaves its *partition*: flat vectors of the parameters' master values and of each of the moments.

    ZeRO 1, 2    group by group, the ranks' partitions one after another hold the parameters one after another
    ZeRO 3       each parameter is padded to a multiple of the ranks and cut evenly; a rank's parts follow one another

1. The files are read by ``torch.load(weights_only=True)``; objects of DeepSpeed's own classes, which are
   not needed, become empty ones, and any other class is refused.
2. Partitions are put together by the shapes in the model's file; their sums must fit.
3. The result: ``model`` (master values), ``optimizer`` (moments by parameter), ``groups``, second names of ``shared``
   parameters, buffers, and the program's own values. DeepSpeed is not needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointPathError
from remesh.checkpoint.foreign.torch_files import read_torch_file
from remesh.checkpoint.formats.inert_objects import StandIn, without_stand_ins

_OWN = ("deepspeed.",)
_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}
"""Members of its enumeration of ZeRO's stages, as early releases of Python 3.11 write them."""
_OF_ENGINE = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("ds_config", "ds_version", "dp_world_size", "mp_world_size", "autoep_layers", "ds_autoep_layers"),
        *("num_experts", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    }
)
"""Keys of a model's file that are the engine's; all others are the program's own."""


@dataclass(frozen=True, slots=True)
class _Partition:
    """What one rank's file holds."""

    vectors: dict[str, list[torch.Tensor]]
    """The flat vectors of each kind (``"master"``, or a moment), by group."""
    steps: list[Any]
    groups: list[dict[str, Any]]
    stage: int
    num_ranks: int
    gaps: list[list[int]] | None
    """For ZeRO 1 and 2, by group: the padding behind each parameter; None if there is none."""


def read_zero(folder: Path) -> dict[str, Any]:
    """The state of a tag's folder, or of the newest tag in a folder; `CheckpointFormatError` for what is wrong."""
    tag = _tag_in(folder)
    parts = [_partition_of(path) for path in _files(tag, "*_optim_states.pt")]
    first = parts[0]
    if any(part.num_ranks != len(parts) for part in parts):
        raise _bad(tag, f"{len(parts)} files of optimizer states, expected one of each of {first.num_ranks} ranks")
    model = _load(_files(tag, "*_model_states.pt")[0])
    shapes = [dict(group) for group in _value_of(model, "param_shapes", tag)]
    if model.get("frozen_param_shapes"):
        raise _bad(tag, "frozen parameters, expected none; load it with DeepSpeed and save what is frozen apart")
    if any(part.vectors.keys() != first.vectors.keys() or part.gaps != first.gaps for part in parts):
        raise _bad(tag, "ranks whose optimizer states are of other kinds, expected the same on all")
    values = {}
    for kind in first.vectors:
        of_ranks = [part.vectors[kind] for part in parts]
        is_even = first.stage == 3
        values[kind] = _merge_even(of_ranks, shapes, tag) if is_even else _merge_in_a_row(of_ranks, shapes, first, tag)
    master = values.pop("master")
    optimizer: dict[str, dict[str, Any]] = {name: {} for name in master}
    for kind, tensors in values.items():
        for name, tensor in tensors.items():
            optimizer[name][kind] = tensor
    for step, group in zip(first.steps, shapes, strict=False):
        for name in group:
            optimizer[name] |= (
                {} if step is None else {"step": torch.as_tensor(step, dtype=torch.float32, device="cpu")}
            )
    buffers = {name: model["module"][name] for name in model.get("buffer_names", ()) if name in model["module"]}
    shared = dict(model.get("shared_params") or {})
    if unknown := {name: other for name, other in shared.items() if other not in master}:
        raise _bad(tag, f"second names of parameters that are not there: {unknown}, expected the first name of each")
    return {
        "model": {**master, **{name: master[other] for name, other in shared.items()}, **buffers},
        "shared": shared,
        "optimizer": optimizer,
        "groups": _groups_of(first, shapes, tag),
        "scheduler": without_stand_ins(model.get("lr_scheduler") or {}),
        "program": without_stand_ins({key: value for key, value in model.items() if key not in _OF_ENGINE}),
    }


def _groups_of(part: _Partition, shapes: Sequence[Mapping[str, Any]], tag: Path) -> list[dict[str, Any]]:
    """Options of each group, with its parameters: a group names its vectors, and ZeRO 3 makes several for each."""
    numbers = [number for group in part.groups for number in group["params"]]
    if numbers != list(range(len(shapes))):
        raise _bad(tag, f"groups of the vectors {numbers}, expected each of {len(shapes)} once, in order")
    return [
        {**without_stand_ins(group), "params": [name for number in group["params"] for name in shapes[number]]}
        for group in part.groups
    ]


def _merge_in_a_row(
    parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Mapping[str, Sequence[int]]], like: _Partition, tag: Path
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for number, group in enumerate(shapes):
        vector = torch.cat([part[number] for part in parts])
        gaps = [0] * len(group) if like.gaps is None else like.gaps[number]
        if len(gaps) != len(group):
            raise _bad(tag, f"{len(gaps)} paddings in group {number}, expected one behind each of {len(group)} tensors")
        start = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            size = math.prod(shape)
            if start + size <= len(vector):
                found[name] = vector[start : start + size].reshape(tuple(shape))
            start += size + gap
        _check_sum(tag, f"group {number}", len(vector), start, 2 * len(parts))
    return found


def _merge_even(
    parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Mapping[str, Sequence[int]]], tag: Path
) -> dict[str, torch.Tensor]:
    vectors = [torch.cat([vector.reshape(-1) for vector in part]) for part in parts]
    found: dict[str, torch.Tensor] = {}
    start = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        size = math.prod(shape)
        length = -(-size // len(parts))
        whole = torch.cat([vector[start : start + length] for vector in vectors])[:size]
        if len(whole) == size:
            found[name] = whole.reshape(tuple(shape))
        start += length
    _check_sum(tag, "a rank's partition", len(vectors[0]), start, 1)
    return found


def _check_sum(tag: Path, what: str, found: int, used: int, alignment: int) -> None:
    if not used <= found < used + max(alignment, 1) + (alignment > 1) * alignment:
        raise _bad(tag, f"{what} has {found} elements, expected {used} and no more padding than {2 * alignment}")


def _partition_of(path: Path) -> _Partition:
    zero_state = _value_of(_load(path), "optimizer_state_dict", path)
    stage, num_ranks = _value_of(zero_state, "zero_stage", path), zero_state.get("partition_count")
    if isinstance(stage, StandIn):
        stage = _STAGES.get(stage.values[-1], stage.values[0])
    stage = int(stage)
    num_ranks = max(num_ranks) if isinstance(num_ranks, list) else int(_value_of(zero_state, "partition_count", path))
    is_even = stage == 3
    if stage not in (1, 2, 3):
        raise _bad(path, f"ZeRO stage {stage}, expected 1, 2 or 3")
    master = _value_of(zero_state, "fp32_flat_groups" if is_even else "single_partition_of_fp32_groups", path)
    base = _value_of(zero_state, "optimizer_state_dict" if is_even else "base_optimizer_state", path)
    if not isinstance(base, dict) or "state" not in base:
        raise _bad(path, "an elastic optimizer state, expected one of each rank; save with elastic_checkpoint: false")
    states = [base["state"].get(number, {}) for number in range(len(master))]
    vectors = {"master": [one.float() for one in master]}
    for kind in sorted({kind for state in states for kind in state} - {"step"}):
        found = zip(states, master, strict=True)
        vectors[kind] = [_moment(state.get(kind), len(one), kind, path) for state, one in found]
    steps = [state.get("step") for state in states]
    gaps = zero_state.get("param_alignment_paddings")
    return _Partition(vectors, steps, base.get("param_groups", []), stage, num_ranks, gaps)


def _moment(found: Any, length: int, kind: str, path: Path) -> torch.Tensor:
    """One moment of a group: as long as its master values, or longer by padding that was taken off those alone."""
    if not isinstance(found, torch.Tensor) or found.ndim != 1 or len(found) < length:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise _bad(path, f"{kind!r} of the optimizer's state as {shape}, expected a vector of {length} elements")
    return found


def _load(path: Path) -> dict[str, Any]:
    return read_torch_file(path, "DeepSpeed", _OWN)


def _tag_in(folder: Path) -> Path:
    latest = folder / "latest"
    tag = folder / latest.read_text().strip() if latest.is_file() else folder
    if not tag.is_dir() or tag.resolve().parent not in (folder.resolve(), folder.resolve().parent):
        raise CheckpointPathError(f"reading a checkpoint of DeepSpeed: no folder {tag}; correct the path, or {latest}")
    return tag


def _files(tag: Path, pattern: str) -> list[Path]:
    """The files of the ranks, in order; a model that was itself cut is refused."""
    found = sorted(tag.glob(pattern), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    if not found:
        raise _bad(tag, f"no file {pattern}, expected one of each rank")
    cut = [path.name for path in found if re.search(r"mp_rank_(?!00_)\d+", path.name) or "expert_" in path.name]
    if cut:
        raise _bad(tag, f"parts of a model that is cut itself ({cut[0]}), expected data parallelism alone")
    return found


def _value_of(found: Mapping[str, Any], key: str, path: Path) -> Any:
    if found.get(key) is None:
        raise _bad(path, f"no {key!r}, expected it")
    return found[key]


def _bad(path: Path, found: str) -> CheckpointFormatError:
    return CheckpointFormatError("bad-deepspeed", f"reading a checkpoint of DeepSpeed ZeRO at {path}: found {found}")
