"""Accelerate's ``save_state`` and ``load_state`` as one checkpoint of Remesh, for any number of processes.

    from remesh.integrations.accelerate import RemeshAccelerator as Accelerator

Models, optimizers, schedulers, the scaler, registered objects and each rank's random numbers go into the directory
that the script names, in one step: a crash leaves the checkpoint before. Optimizer states lie under the names of their
parameters, so another number of processes, or a single one, finds its own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from remesh.checkpoint.plain import load, save
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.checkpoint.storage import location_of
from remesh.errors import ConfigError
from remesh.integrations.hosts import check_host
from remesh.integrations.random_numbers import num_ranks_of, random_rows, take_random_rows

check_host("accelerate", (1, 10))

from accelerate import Accelerator, DistributedType  # noqa: E402 - what is missing is said first

_FOREIGN = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
"""Engines that keep and save the state of training themselves."""


class RemeshAccelerator(Accelerator):
    """An ``Accelerator`` whose states are checkpoints of Remesh."""

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> str:
        """Write the state of training as one checkpoint; called by every process. Returns the directory.

        Raises the same error on all processes, and then no checkpoint is there.
        """
        self._check_can_save("saving", save_model_func_kwargs)
        naming = self.project_configuration
        folder = Path(output_dir) if output_dir is not None else None
        if naming.automatic_checkpoint_naming:
            folder = Path(self.project_dir, "checkpoints", f"checkpoint_{naming.iteration}")
        if folder is None:
            raise ConfigError("saving a state with accelerate: no output_dir is given, and no automatic naming is on")
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, [], str(folder))
        save({**self._state(), "random": random_rows()}, folder)
        naming.iteration += 1
        if naming.automatic_checkpoint_naming and naming.total_limit is not None and self.is_main_process:
            for old in _numbered(folder.parent)[: -naming.total_limit]:
                shutil.rmtree(old)
        return str(folder)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Fill models, optimizers and the rest from a checkpoint that any number of processes saved."""
        self._check_can_save("loading", {**load_model_func_kwargs, **(load_kwargs or {})})
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            found = _numbered(Path(self.project_dir, "checkpoints"))
            input_dir = found[-1] if found else None
        if input_dir is None:
            raise ConfigError("loading a state with accelerate: no input_dir is given, and none is there by its name")
        state, rows = self._state(), random_rows()
        stored = open_checkpoint(location_of(input_dir)).manifest.tensors
        if num_ranks_of(stored["random.torch"]) == self.num_processes:
            state["random"] = rows  # another number of processes goes on with the seeds that its script has set
        for hook in self._load_model_state_pre_hook.values():
            hook(self._models, str(input_dir))
        loaded = load(state, input_dir)
        for model, optimizers, told in self._with_optimizers():
            set_state_dict(
                model,
                optimizers,
                model_state_dict=loaded["models"][told],
                optim_state_dict=loaded["optimizers"].get(told, {}),
            )
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

    def _with_optimizers(self) -> list[tuple[nn.Module, list[torch.optim.Optimizer], str]]:
        """Each model with the optimizers that hold its parameters, and its name in the checkpoint."""
        plain = [getattr(one, "optimizer", one) for one in self._optimizers]
        found = []
        for number, model in enumerate(self._models):
            own = {id(parameter) for parameter in model.parameters()}
            mine = [
                one for one in plain if any(id(each) in own for group in one.param_groups for each in group["params"])
            ]
            found.append((model, mine, str(number)))
        return found

    def _check_can_save(self, doing: str, options: Mapping[str, Any]) -> None:
        if options:
            raise ConfigError(
                f"{doing} a state with accelerate: {sorted(options)} are not supported by Remesh; leave them out"
            )
        if self.distributed_type in _FOREIGN:
            raise ConfigError(
                f"{doing} a state with accelerate: {_FOREIGN[self.distributed_type]} keeps the state of training "
                "itself; expected DDP, FSDP2 or one process; use accelerate's own Accelerator there"
            )
        if self.distributed_type is DistributedType.FSDP and not self.is_fsdp2:
            raise ConfigError(
                f"{doing} a state with accelerate: FSDP is of version 1; set fsdp_version: 2 in its config"
            )
        if any(getattr(one, "use_stateful_dataloader", False) for one in self._dataloaders):
            raise ConfigError(
                f"{doing} a state with accelerate: a stateful dataloader belongs to one number of processes; save the "
                "position in samples with register_for_checkpointing, and skip them with skip_first_batches"
            )


def _numbered(folder: Path) -> list[Path]:
    """Checkpoints named automatically, the oldest first."""
    names = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint_\d+", path.name)] if folder.is_dir() else []
    return sorted(names, key=lambda path: int(path.name.rpartition("_")[2]))
