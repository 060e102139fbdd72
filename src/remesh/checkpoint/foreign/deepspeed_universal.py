"""Writer of DeepSpeed's universal checkpoints, from which any number of ranks resumes.

For ``remesh ckpt convert --to deepspeed-universal``. DeepSpeed reads a folder with a file for each state of each
parameter, whole, and each rank cuts its partition from them. What it reads differs by the stage of ZeRO, so both are
written, and one folder serves all stages:

    latest_universal                                the tag, written last
    TAG/mp_rank_00_model_states.pt                  counters, scheduler and the program's own values: ZeRO 1 and 2
    TAG/zero_pp_rank_0_mp_rank_00_model_states.pt   the same for ZeRO 3
    TAG/zero/optimizer_state.pt                     options of the groups
    TAG/zero/PARAMETER/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt

1. Parameters are those that the groups name; each needs master values, both moments of Adam, and one step for all.
2. ZeRO 3 gives the options of the first group to all of them. So only those that all groups share are written; the
   others stay as the script sets them.
3. DeepSpeed restores no buffers from such a folder: they are handed to the program in its client state.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError, CheckpointPathError
from remesh.checkpoint.run.reader import OpenCheckpoint
from remesh.checkpoint.run.stored_values import read_box
from remesh.foundation.files import flush, replace_whole

BUFFERS = "buffers"
"""The key of the model's buffers in the client state."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_OLDEST_VERSION = "0.19.8"
"""The version of DeepSpeed whose files these are like."""


@dataclass(frozen=True, slots=True)
class WrittenForDeepSpeed:
    """What was written for DeepSpeed."""

    tag: Path
    num_parameters: int
    buffers: tuple[str, ...]
    """Names of the buffers that the program has to put back itself."""
    left_out: tuple[str, ...]
    """Names of tensors that have no place in the client state."""
    set_by_script: tuple[str, ...]
    """Options that differ between groups, which ZeRO 3 does not restore."""


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """What the checkpoint has of an optimizer."""

    prefix: str
    """The prefix of the names of all its tensors."""
    groups: tuple[Mapping[str, Any], ...]
    """Options, and under ``"params"`` the names of the parameters."""

    @property
    def parameters(self) -> list[str]:
        return [name for group in self.groups for name in group["params"]]


def write_universal(source: OpenCheckpoint, target: Path) -> WrittenForDeepSpeed:
    """Write the folder; `CheckpointMismatchError` before a byte is written if the checkpoint lacks anything.

    The source has ``model.<parameter>``, and ``optimizer.<parameter>.<moment>`` with ``groups``, as written by
    ``--from deepspeed-zero``, or ``optimizer.state.<parameter>.<moment>`` with ``optimizer.param_groups``, as in
    torch. One tensor at a time is in memory.
    """
    optimizer = _optimizer_of(source)
    _check_complete(source, optimizer)
    steps = _steps_of(source, optimizer)
    client, left_out = _client_state_of(source)
    buffers = _buffers_of(source, optimizer)
    if buffers:
        client[BUFFERS] = {name: read_box(source, f"model.{name}") for name in buffers}
    num_steps = int(client.pop("global_steps", steps))
    tag = target / f"global_step{num_steps}_universal"
    fresh = target / f".{tag.name}.part"
    if tag.exists():
        raise CheckpointPathError(f"writing a universal checkpoint of DeepSpeed: {tag} is there; give a new folder")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "zero").mkdir(parents=True)
    _write_parameters(source, optimizer, fresh / "zero", steps)
    model = {
        "module": client.get(BUFFERS, {}),
        "lr_scheduler": source.common.get("scheduler") or None,
        "global_steps": num_steps,
        "skipped_steps": client.pop("skipped_steps", 0),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _OLDEST_VERSION,
        **client,
    }
    for stem in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        _save(model, fresh / f"{stem}_model_states.pt")
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.groups]
    shared = {key: value for key, value in options[0].items() if all(one.get(key) == value for one in options)}
    _save(_optimizer_states(options, shared, _as_kept(steps, optimizer)), fresh / "zero" / "optimizer_state.pt")
    flush(fresh)
    fresh.replace(tag)
    replace_whole(target / "latest_universal", tag.name.encode(), mode=0o644)
    differing = sorted({key for one in options for key in one} - shared.keys())
    return WrittenForDeepSpeed(tag, len(optimizer.parameters), buffers, left_out, tuple(differing))


def _optimizer_of(source: OpenCheckpoint) -> _Optimizer:
    held = source.common.get("optimizer")
    of_torch = held.get("param_groups") if isinstance(held, Mapping) else None
    for prefix, groups in (("optimizer.", source.common.get("groups")), ("optimizer.state.", of_torch)):
        if isinstance(groups, Sequence) and groups and all(_names_parameters(group) for group in groups):
            return _Optimizer(prefix, tuple(groups))
    raise _bad(
        source,
        "no groups of an optimizer that name their parameters, expected 'groups', or 'optimizer.param_groups' as "
        "torch's get_optimizer_state_dict makes it",
    )


def _names_parameters(group: Any) -> bool:
    names = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(names, Sequence) and all(isinstance(name, str) for name in names)


def _check_complete(source: OpenCheckpoint, optimizer: _Optimizer) -> None:
    """Raise for all that is missing at once, and for states that DeepSpeed would leave behind in silence."""
    held = source.manifest.tensors
    wanted = [f"model.{name}" for name in optimizer.parameters]
    wanted += [f"{optimizer.prefix}{name}.{kind}" for name in optimizer.parameters for kind in (*_MOMENTS, "step")]
    if missing := [name for name in wanted if name not in held]:
        raise _bad(
            source,
            f"{len(missing)} of {len(wanted)} tensors missing, expected values, {', '.join(_MOMENTS)} and step of "
            "every parameter of the optimizer (Adam's):\n  " + "\n  ".join(missing),
        )
    if strange := sorted(name for name in held if name.startswith("optimizer.") and name not in set(wanted)):
        raise _bad(
            source,
            f"{len(strange)} states of the optimizer that no universal checkpoint has, expected {', '.join(_MOMENTS)} "
            "and step:\n  " + "\n  ".join(strange),
        )
    for name in optimizer.parameters:
        shapes = {kind: held[f"{optimizer.prefix}{name}.{kind}"].global_shape for kind in _MOMENTS}
        if any(shape != held[f"model.{name}"].global_shape for shape in shapes.values()):
            raise _bad(source, f"moments of {name!r} as {shapes}, expected {held[f'model.{name}'].global_shape}")


def _steps_of(source: OpenCheckpoint, optimizer: _Optimizer) -> float:
    """The step of all parameters: DeepSpeed counts one step for all of them."""
    steps = {float(read_box(source, f"{optimizer.prefix}{name}.step")) for name in optimizer.parameters}
    if len(steps) > 1:
        raise _bad(source, f"parameters at steps {sorted(steps)}, expected all at one")
    return steps.pop()


def _as_kept(steps: float, optimizer: _Optimizer) -> torch.Tensor | int:
    """The step as the optimizer has it: torch's own count in a tensor, those of DeepSpeed in a number."""
    is_of_torch = any("capturable" in group for group in optimizer.groups)
    return torch.tensor(steps, dtype=torch.float32, device="cpu") if is_of_torch else int(steps)


def _client_state_of(source: OpenCheckpoint) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the program gave to its save, and the names of its tensors that lie too deep for their place to be known."""
    client = dict(source.common.get("program") or {})
    left_out = []
    for name in source.manifest.tensors:
        if name.startswith("program.") and name.count(".") == 1:
            client[name.removeprefix("program.")] = read_box(source, name)
        elif not name.startswith(("model.", "optimizer.")):
            left_out.append(name)
    return client, tuple(left_out)


def _buffers_of(source: OpenCheckpoint, optimizer: _Optimizer) -> tuple[str, ...]:
    """The model's tensors that are in no group of the optimizer, without second names of parameters."""
    known = {*optimizer.parameters, *(source.common.get("shared") or {})}
    names = [name.removeprefix("model.") for name in source.manifest.tensors if name.startswith("model.")]
    return tuple(name for name in names if name not in known)


def _write_parameters(source: OpenCheckpoint, optimizer: _Optimizer, folder: Path, steps: float) -> None:
    for name in optimizer.parameters:
        place = folder / name
        place.mkdir()
        _save({"param": read_box(source, f"model.{name}").float()}, place / "fp32.pt")
        for kind in _MOMENTS:
            _save({"param": read_box(source, f"{optimizer.prefix}{name}.{kind}").float()}, place / f"{kind}.pt")
        _save(_as_kept(steps, optimizer), place / "step.pt")
        flush(place)


def _optimizer_states(
    options: Sequence[Mapping[str, Any]], shared: Mapping[str, Any], steps: torch.Tensor | int
) -> dict[str, Any]:
    """What ZeRO 1 and 2 read at the top, and ZeRO 3 below ``optimizer_state_dict``."""
    of_first = {**shared, "params": [0]}
    return {
        "param_groups": [{**one, "params": [number]} for number, one in enumerate(options)],
        "ds_version": _OLDEST_VERSION,
        "optimizer_state_dict": {"state": {0: {"step": steps}}, "param_groups": [of_first]},
    }


def _save(value: Any, path: Path) -> None:
    torch.save(value, path)
    flush(path)


def _bad(source: OpenCheckpoint, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(f"writing {source.directory} as a universal checkpoint of DeepSpeed: found {found}")
