"""Lightning's checkpoints in one step: a plugin for DDP and one device, a strategy for sharded models.

    Trainer(plugins=[RemeshCheckpointIO()])
    Trainer(strategy=RemeshModelParallelStrategy(...))

With DDP the first process has everything, and Lightning hands it over as one dict: a file, as Lightning's own, appears
in full or not at all. Sharded strategies go around that plugin; ours overrides the two methods that do, so every
process writes its part, and another number of processes reads its own.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from remesh.checkpoint.checkpoint_errors import CheckpointPathError, as_checkpoint_errors
from remesh.checkpoint.formats.data_file import dump_object, load_object
from remesh.checkpoint.plain import load_chosen, save
from remesh.checkpoint.run.housekeeping import remove_checkpoint
from remesh.checkpoint.run.load_requests import stored_names
from remesh.checkpoint.run.reader import OpenCheckpoint
from remesh.checkpoint.storage import location_of, store_of
from remesh.comm.gather import step_together
from remesh.foundation.errors import ConfigError
from remesh.integrations.first_rank import buffer_names, with_first_buffers
from remesh.integrations.host_programs import check_host
from remesh.integrations.moments import set_moments, stored_moments

check_host("lightning", (2, 5))

from lightning.pytorch.plugins.io import CheckpointIO  # noqa: E402 - what is missing is reported first
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

_REST = "what Lightning keeps beside model and optimizers"


class RemeshCheckpointIO(CheckpointIO):
    """Files as Lightning's own: a path, or a URL of any store. An older file stays until the new one is complete.

    A value that could not be loaded again without running code is refused when it is saved.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the checkpoint durably; called by the first process alone."""
        _refuse_options(storage_options)
        place = location_of(path)
        with as_checkpoint_errors(f"saving checkpoint {place}"):
            store_of(place).make_directory(place.parent)
            store_of(place).put(place, dump_object(checkpoint, "Lightning's checkpoint"))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the checkpoint, with tensors on the CPU; called by every process."""
        if map_location not in (None, "cpu", torch.device("cpu")):
            raise ConfigError(f"loading checkpoint {path}: map_location is {map_location!r}, expected the CPU")
        _refuse_code(path, weights_only)
        place = location_of(path)
        try:
            content = store_of(place).read(place)
        except (FileNotFoundError, IsADirectoryError) as raised:
            raise CheckpointPathError(f"loading checkpoint {place}: {raised}; correct the path") from raised
        loaded: dict[str, Any] = load_object(content, str(place))
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the file, or the directory of a sharded checkpoint; of a link, the link."""
        place = location_of(path)
        if _remove_link(path):
            return
        if store_of(place).is_directory(place):
            remove_checkpoint(place)
        else:
            store_of(place).remove(place)


class RemeshModelParallelStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` (FSDP2, tensor parallel, both) whose checkpoints are those of Remesh."""

    def __init__(self, data_parallel_size: Any = "auto", tensor_parallel_size: Any = "auto", **options: Any) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, **options)
        if options.get("save_distributed_checkpoint", True) is not True:
            raise ConfigError(
                "setting up Lightning: save_distributed_checkpoint=False gathers everything on one process, expected "
                "True; leave it out, and make one file with remesh ckpt export"
            )
        self.checkpoint_io = RemeshCheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one checkpoint in the directory ``filepath``, in the place of a link; called by every process."""
        _refuse_options(storage_options)
        path = os.fspath(self.broadcast(filepath))
        model, optimizers = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        assert self.model is not None, "Lightning sets a model up before it saves"
        buffers = buffer_names(self.model, get_model_state_dict(self.model))
        state = {
            "state_dict": with_first_buffers(model, buffers),
            "optimizers": {str(number): one for number, one in enumerate(optimizers)},
            "rest": dump_object(checkpoint, _REST),
        }
        # Behind save_last="link" there is another checkpoint, to be kept.
        step_together(lambda: self.is_global_zero and _remove_link(path), None, f"saving checkpoint {path}")
        save(state, path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill model and optimizers, and return the rest; called by every process, of any number of processes."""
        path = os.fspath(self.broadcast(checkpoint_path))
        _refuse_code(path, weights_only)
        assert self.model is not None, "Lightning sets a model up before it loads"
        optimizers = {str(number): one for number, one in enumerate(self.optimizers)}
        model = get_model_state_dict(self.model)
        states = {name: get_optimizer_state_dict(self.model, one) for name, one in optimizers.items()}

        def choose(opened: OpenCheckpoint) -> dict[str, Any]:
            stored = stored_names(opened)
            moments = {name: stored_moments(one, f"optimizers.{name}", stored) for name, one in states.items()}
            return {"state_dict": model, "optimizers": moments}

        loaded = load_chosen(choose, path)
        set_model_state_dict(self.model, loaded["state_dict"])
        for name, one in optimizers.items():
            set_moments(self.model, one, loaded["optimizers"][name])
        rest: dict[str, Any] = load_object(loaded["rest"], f"{_REST} in {path}")
        return rest


def _remove_link(path: Any) -> bool:
    """Whether there was a symbolic link, which is gone now; what it leads to stays."""
    is_link = os.path.islink(path)
    if is_link:
        os.remove(path)
    return is_link


def _refuse_options(storage_options: Any) -> None:
    if storage_options is not None:
        raise ConfigError(
            f"saving with Lightning: Remesh has no storage_options, found {storage_options!r}; leave them out, stores "
            "take what they need from the environment"
        )


def _refuse_code(path: Any, weights_only: bool | None) -> None:
    if weights_only is False:
        raise ConfigError(
            f"loading checkpoint {path}: weights_only=False runs code that the file holds, which Remesh does not; "
            "leave it out, and allow classes of yours with torch.serialization.add_safe_globals"
        )
