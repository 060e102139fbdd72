"""Descriptions of optimizer state: it is sharded like the parameters that it belongs to.

An optimizer's ``state_dict`` knows parameters by number. They are found in the model's sharded state dict by identity:
a `ShardedTensor` or factory whose ``data`` is the parameter itself. So the model's state dict must hold parameters, not
copies or views, and whatever transforms one must be a factory with the parameter as its ``data``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from remesh.checkpoint.values.nests import nested_values

logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    " Make sure state dict contains original torch.nn.Parameters (not pure torch.Tensors): pass `keep_vars=True` to "
    "`.state_dict()`. If a parameter is transformed, do it in a ShardedTensorFactory whose data is the parameter."
)

Sharded = ShardedTensor | ShardedTensorFactory


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """By ``id`` of each parameter its number; the first occurrence counts."""
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(optim_params_iter):
        numbers.setdefault(id(parameter), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, Sharded]:
    """Map the number of each optimizer parameter to the model's entity whose data it is.

    Parameters that the model's state dict does not have are left out; when none is found, a warning gives the reason.
    """
    numbers = get_optim_param_to_id_map(optim_params_iter)
    found: dict[int, Sharded] = {}
    for entity in nested_values(model_sharded_state_dict):
        if isinstance(entity, Sharded) and id(entity.data) in numbers:
            found[numbers[id(entity.data)]] = entity
    if not found:
        logger.warning(
            "Sharded parameters mapping is empty. It means tensors in model state dict do not correspond to tensors in "
            "optimizer parameters map.%s",
            KEEP_VARS_HINT,
        )
    return found


def make_sharded_optimizer_tensor(model_param: Sharded, optim_param: torch.Tensor, prefix: str) -> Sharded:
    """The entity for a tensor of optimizer state, placed like the parameter and keyed ``{prefix}.{its key}``.

    >>> parameter = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 2))
    >>> make_sharded_optimizer_tensor(parameter, torch.ones(2, dtype=torch.float64), "optimizer.state.exp_avg").key
    'optimizer.state.exp_avg.w'
    """
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=optim_param)
    if tuple(optim_param.shape) != model_param.data_shape:
        raise CheckpointMismatchError(
            f"describing optimizer state {key!r}: its tensor has shape {tuple(optim_param.shape)}, expected "
            f"{model_param.data_shape}, that of the parameter; give state of another form a description of its own"
        )
    return replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: dict[int, Sharded],
    exclude_keys: tuple[str, ...] = (),
) -> None:
    """Replace the tensors of an optimizer's state dict by sharded ones, in place.

    Entries called as in ``exclude_keys`` are left out, for the caller to keep in another way, such as a step that is
    one number for all parameters. The lists of parameter numbers become nonpersistent, since
    numbers differ between ranks. Raises ValueError for state of a parameter that is not in the map.
    """
    sharded: dict[int, dict[str, Any]] = {}
    for number, state in optim_state_dict["state"].items():
        sharded[number] = {}
        for name, value in state.items():
            if name in exclude_keys:
                continue
            if number not in id_to_sharded_param_map:
                raise ValueError(f"Param id {number} does not match any model sharded param")
            sharded[number][name] = make_sharded_optimizer_tensor(
                id_to_sharded_param_map[number], value, prefix=f"optimizer.state.{name}"
            )
    optim_state_dict["param_groups"] = deepcopy(optim_state_dict["param_groups"])
    for group in optim_state_dict["param_groups"]:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict["state"] = sharded
