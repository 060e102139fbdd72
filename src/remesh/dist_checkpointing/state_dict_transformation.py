"""The older name of `remesh.dist_checkpointing.state_dict_utils`."""

from __future__ import annotations

from remesh.dist_checkpointing.state_dict_utils import (
    filter_out_empty_flatten_tensor,
    load_preprocess,
    save_preprocess,
)

__all__ = ["filter_out_empty_flatten_tensor", "load_preprocess", "save_preprocess"]
