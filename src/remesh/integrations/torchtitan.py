"""torchtitan's checkpoint manager with files of Remesh: committed in one step, checksummed, for any number of ranks.

    checkpoint=RemeshCheckpointManager.Config(enable=True, interval=500)    # in a config; was CheckpointManager.Config

When to save, what to leave out, which to remove, and Hugging Face's files stay torchtitan's. Its two methods that call
DCP are overridden: they name another writer and reader.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from remesh.foundation.errors import ConfigError
from remesh.integrations.dcp import DcpReader, DcpWriter
from remesh.integrations.host_programs import check_host

check_host("torchtitan", (0, 3))

from torchtitan.components.checkpointer.base import MODEL  # noqa: E402 - what is missing is reported first
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager  # noqa: E402


class RemeshCheckpointManager(CheckpointManager):
    """torchtitan's ``CheckpointManager``; ``async_mode`` may be ``"disabled"`` or ``"async"``."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The same options as torchtitan's own."""

    def __init__(self, config: Config, **parts: Any) -> None:
        if config.enable and config.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM.value:
            self.enable = False  # what torchtitan looks at when it takes this object down
            raise ConfigError(
                f"setting up checkpoints of torchtitan: async_mode is {config.async_mode!r}, whose saves are another "
                "process's, expected 'disabled' or 'async'; take 'async', which copies and writes in the background"
            )
        super().__init__(config, **parts)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save the states; a save in the background returns a future of its end."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer, saving = DcpWriter(checkpoint_id), None
        if async_mode is AsyncMode.ASYNC:
            saving = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            dcp.save(state_dict, storage_writer=writer)
        if enable_garbage_collection:
            gc.collect(1)
        return saving

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool = False, from_quantized: bool = False
    ) -> None:
        """Fill the states from a checkpoint."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=DcpReader(checkpoint_id))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
