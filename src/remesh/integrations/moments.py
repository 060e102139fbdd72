"""Optimizer states that a checkpoint has: only those of parameters that have had a gradient.

An optimizer makes the states of a parameter when it first has a gradient: a layer that the loss does not see, or that
was frozen until now, has none. torch's ``get_state_dict`` of a fresh optimizer has them of all parameters. So a load
asks only for those that are stored, and the others begin as they would in the job that saved: without any.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

_STATE = "state"


def stored_moments(states: Mapping[str, Any], place: str, stored: Collection[str]) -> dict[str, Any]:
    """Of ``get_state_dict``'s states of optimizers what to load: without parameters of which nothing is stored.

    ``place`` is their name in the checkpoint, ``stored`` what `stored_names` returns for it. A checkpoint that has the
    states of no parameter at all is asked for all of them: it is none of this optimizer.
    """
    of_parameters = states.get(_STATE, {})
    found = {name: one for name, one in of_parameters.items() if f"{place}.{_STATE}.{name}" in stored}
    return {**states, _STATE: found} if found else dict(states)


def set_moments(
    model: nn.Module, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], states: Mapping[str, Any]
) -> None:
    """Give optimizers what was loaded; a parameter without states has none afterwards."""
    several = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, several, optim_state_dict=dict(states), options=options)
