"""Accelerate's ``save_state`` and ``load_state`` as one checkpoint of Remesh, for any number of processes.

    from remesh.integrations.accelerate import RemeshAccelerator as Accelerator

Models, optimizers, schedulers, the scaler, registered objects and each rank's random numbers go into the directory
that the script names, in one step: a crash leaves the checkpoint before. Optimizer states lie under the names of their
parameters, so another number of processes, or a single one, finds its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict

from remesh.checkpoint.plain import load_chosen, save
from remesh.checkpoint.run.load_requests import stored_names
from remesh.checkpoint.run.reader import OpenCheckpoint, is_complete
from remesh.checkpoint.storage import Location, location_of
from remesh.comm.gather import gather_from, group_rank
from remesh.foundation.errors import ConfigError
from remesh.integrations.first_rank import buffer_names, of_first_rank, with_first_buffers
from remesh.integrations.host_programs import check_host
from remesh.integrations.moments import set_moments, stored_moments
from remesh.integrations.random_numbers import random_rows, rows_to_load, take_random_rows

check_host("accelerate", (1, 10))

from accelerate import Accelerator, DistributedType  # noqa: E402 - what is missing is reported first

_FOREIGN = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
"""Engines that keep and save the state of training themselves."""
_SAVING = "saving a state with accelerate"
_LOADING = "loading a state with accelerate"


class RemeshAccelerator(Accelerator):
    """An ``Accelerator`` whose states are checkpoints of Remesh."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._wrapped: WeakSet[nn.Module] = WeakSet()

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Prepare a model as Accelerate does, and remember what it is wrapped in."""
        prepared: nn.Module = super().prepare_model(model, *args, **options)
        self._wrapped.add(prepared)
        return prepared

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> str:
        """Write the state of training as one checkpoint; called by every process. Returns the directory.

        Raises the same error on all processes, and then no checkpoint is there.
        """
        self._check_can(_SAVING, save_model_func_kwargs)
        naming = self.project_configuration
        folder = Path(output_dir) if output_dir is not None else None
        if naming.automatic_checkpoint_naming:
            folder = Path(self.project_dir, "checkpoints", f"checkpoint_{naming.iteration}")
        if folder is None:
            raise ConfigError(f"{_SAVING}: no output_dir is given, and no automatic naming is on")
        state = self._state()
        if self._save_model_state_pre_hook:
            state["models"] = self._left_by_hooks(state["models"], folder)
        save({**self._as_saved(state), "random": random_rows()}, folder)
        naming.iteration += 1
        if naming.automatic_checkpoint_naming and naming.total_limit is not None and self.is_main_process:
            _remove_old(folder.parent, max(naming.total_limit, 1))
        return str(folder)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Fill models, optimizers and the rest from a checkpoint that any number of processes saved."""
        self._check_can(_LOADING, {**load_model_func_kwargs, **(load_kwargs or {})})
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = next(reversed(_complete(Path(self.project_dir, "checkpoints"))), None)
        if input_dir is None:
            raise ConfigError(f"{_LOADING}: no input_dir is given, and none is there by its name")
        place = location_of(os.path.expanduser(input_dir))
        state, by_hooks = self._state(), self._loaded_by_hooks(str(place))
        models = {name: one for name, one in state["models"].items() if name not in by_hooks}

        def choose(checkpoint: OpenCheckpoint) -> dict[str, Any]:
            stored = stored_names(checkpoint)
            self._check_objects(checkpoint.directory, stored)
            states = state["optimizers"].items()
            moments = {name: stored_moments(one, f"optimizers.{name}", stored) for name, one in states}
            # Another number of processes has no rows, and goes on with the seeds that its script has set.
            rows = rows_to_load(checkpoint.manifest.tensors)
            return {**state, "models": models, "optimizers": moments, **({"random": rows} if rows else {})}

        loaded = load_chosen(choose, place)
        for model, optimizers, told in self._with_optimizers():
            weights, moments = (loaded.get(kind, {}).get(told, {}) for kind in ("models", "optimizers"))
            if weights:
                set_model_state_dict(model, weights)
            if moments:
                set_moments(model, optimizers, moments)
        if "random" in loaded:
            take_random_rows(loaded["random"])
        self.step = loaded["step"]

    def _state(self) -> dict[str, Any]:
        """The state without random numbers; objects that load their own state stand in it themselves."""
        models: dict[str, Any] = {}
        optimizers: dict[str, Any] = {}
        for model, of_model, name in self._with_optimizers():
            models[name], of_them = get_state_dict(model, of_model)
            if of_model:
                optimizers[name] = of_them
        objects = {"schedulers": self._schedulers, "objects": self._custom_objects}
        return {
            "models": models,
            "optimizers": optimizers,
            **{kind: {str(number): one for number, one in enumerate(found)} for kind, found in objects.items()},
            **({} if self.scaler is None else {"scaler": self.scaler}),
            "step": self.step,
        }

    def _as_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with what processes may hold apart as the first one has it: buffers, and steps of LocalSGD."""
        if not all(getattr(model, "require_backward_grad_sync", True) for model in self._wrapped):
            return {**state, **{kind: of_first_rank(state[kind]) for kind in ("models", "optimizers")}}
        named = [(name, self._models[int(name)], weights) for name, weights in state["models"].items()]
        models = {name: with_first_buffers(weights, buffer_names(model, weights)) for name, model, weights in named}
        return {**state, "models": models}

    def _with_optimizers(self) -> list[tuple[nn.Module, list[torch.optim.Optimizer], str]]:
        """Each model with the optimizers of its parameters, and its name in the checkpoint.

        Raises `ConfigError` for an optimizer whose parameters are not all of one model, for they have no names.
        """
        of_model: list[list[torch.optim.Optimizer]] = [[] for _ in self._models]
        own = [{id(parameter) for parameter in model.parameters()} for model in self._models]
        for number, optimizer in enumerate(self._optimizers):
            plain = getattr(optimizer, "optimizer", optimizer)
            wanted = {id(one) for group in plain.param_groups for one in group["params"]}
            owner = next((index for index, found in enumerate(own) if wanted <= found), None)
            if owner is None:
                raise ConfigError(
                    f"naming the states of optimizer {number} of accelerate: no prepared model has all of its "
                    f"{len(wanted)} parameters, the nearest has {max((len(wanted & one) for one in own), default=0)}; "
                    "prepare the model that they are of, and one optimizer for each model"
                )
            of_model[owner].append(plain)
        return [(model, of_model[index], str(index)) for index, model in enumerate(self._models)]

    def _left_by_hooks(self, models: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The models whose weights hooks have left in their list; those that a hook takes out, it saves itself."""
        weights = list(models.values())

        def ask() -> list[str]:
            folder.mkdir(parents=True, exist_ok=True)
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, str(folder))
            left = {id(one) for one in weights}
            if strange := left.difference(map(id, models.values())):
                raise ConfigError(
                    f"{_SAVING}: a hook has put {len(strange)} other weights into its list, "
                    "expected those that it was given, or fewer; save them in a registered object"
                )
            return [name for name, one in models.items() if id(one) in left]

        gathered = gather_from(ask, None, _SAVING)
        return {name: one for name, one in models.items() if all(name in left for left in gathered)}

    def _loaded_by_hooks(self, folder: str) -> list[str]:
        """The names of the models that hooks have loaded themselves: those that a hook takes out of its list."""
        models = list(self._models)

        def ask() -> list[str]:
            for hook in self._load_model_state_pre_hook.values():
                hook(models, folder)
            left = {id(model) for model in models}
            return [str(index) for index, model in enumerate(self._models) if id(model) not in left]

        return [] if not self._load_model_state_pre_hook else gather_from(ask, None, _LOADING)[group_rank()]

    def _check_objects(self, directory: Location, stored: Iterable[str]) -> None:
        """Raise `ConfigError` unless there are as many registered objects as were saved, which go by their numbers."""
        names = (name.split(".") for name in stored)
        found = len({parts[1] for parts in names if parts[0] == "objects" and len(parts) > 1})
        if found != len(self._custom_objects):
            raise ConfigError(
                f"{_LOADING}: {directory} has {found} registered objects, expected "
                f"{len(self._custom_objects)} as are registered now; register the same ones in the same order"
            )

    def _check_can(self, doing: str, options: Mapping[str, Any]) -> None:
        if options:
            raise ConfigError(f"{doing}: {sorted(options)} are not supported by Remesh; leave them out")
        if self.project_configuration.save_on_each_node:
            raise ConfigError(
                f"{doing}: save_on_each_node=True makes a copy on every machine, expected one "
                "directory that all processes see; leave it out"
            )
        if self.distributed_type in _FOREIGN:
            raise ConfigError(
                f"{doing}: {_FOREIGN[self.distributed_type]} keeps the state of training "
                "itself; expected DDP, FSDP2 or one process; use accelerate's own Accelerator there"
            )
        if self.distributed_type is DistributedType.FSDP and not self.is_fsdp2:
            raise ConfigError(f"{doing}: FSDP is of version 1; set fsdp_version: 2 in its config")
        if any(getattr(one, "use_stateful_dataloader", False) for one in self._dataloaders):
            raise ConfigError(
                f"{doing}: a stateful dataloader belongs to one number of processes; save the "
                "position in samples with register_for_checkpointing, and skip them with skip_first_batches"
            )


def _remove_old(folder: Path, limit: int) -> None:
    """Remove what is older than the newest complete checkpoints that the limit keeps."""
    first = next(iter(_complete(folder)[-limit:]), None)
    for old in _numbered(folder):
        if old == first:
            return
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints named automatically, the oldest first; torn ones are passed over."""
    return [path for path in _numbered(folder) if is_complete(location_of(path))]


def _numbered(folder: Path) -> list[Path]:
    """Folders named automatically, the oldest first."""
    names = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint_\d+", path.name)] if folder.is_dir() else []
    return sorted(names, key=lambda path: int(path.name.rpartition("_")[2]))
