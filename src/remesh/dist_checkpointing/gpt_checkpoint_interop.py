"""Refusal of a GPT's checkpoint for a hybrid model: the layers of models are not known here.

Training loops import these names with every load and call them where a GPT's checkpoint is to fill a hybrid model.
"""

from __future__ import annotations

from typing import Any, NoReturn

from remesh.checkpoint.checkpoint_errors import CheckpointingException


class GPTInteropError(CheckpointingException, ValueError):
    """A checkpoint of a GPT is asked for in terms of another model."""


def gpt_compatible_layer_maps(hybrid_layer_pattern: str, *_: Any, **__: Any) -> NoReturn:
    """Refuse: the layer maps of hybrid models are not supported."""
    raise GPTInteropError(
        f"loading a checkpoint of a GPT into a hybrid model of layers {hybrid_layer_pattern!r}: its layers are not "
        "renamed here, expected a checkpoint of a hybrid model; load it once with megatron.core.dist_checkpointing, "
        "save it, and go on from there"
    )


# Layer maps are made by that function, so no caller reaches those that use them.
retarget_sharded_state_dict_to_gpt_checkpoint = gpt_compatible_layer_maps
retarget_fsdp_state_dict_to_gpt_checkpoint = gpt_compatible_layer_maps
