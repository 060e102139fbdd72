"""Moments of optimizers: made by an empty step, and refused where they are not in the optimizer's ``state``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from remesh.comm.gather import is_out_of_memory
from remesh.foundation.errors import ConfigError

_ADVICE = (
    "expected all of it in its .state and .param_groups, where it can be carried; shard the moments with FSDP2 or "
    "DTensor parameters instead, or keep what is outside in an object with state_dict and carry that"
)
_MAX_DEPTH = 4
"""How deep the attributes of an optimizer are looked through for tensors."""


def take_empty_step(optim: torch.optim.Optimizer, some: Collection[torch.Tensor]) -> None:
    """One step with zero gradients and zero learning rate: optimizers allocate lazily, and know their own moments best.

    Of ``some`` parameters alone: optimizers pass over those without a gradient. Whatever the step writes into the
    moments is overwritten by what is carried; the parameters do not move. Should it fail, for want of memory, the
    optimizer is as it was; `ConfigError` for one that cannot take such a step.
    """
    rates = [group["lr"] for group in optim.param_groups]
    parameters = [parameter for group in optim.param_groups for parameter in group["params"]]
    kept = [parameter.grad for parameter in parameters]
    had_moments = set(optim.state)
    chosen = set(map(id, some))
    try:
        for group in optim.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in chosen else None
        optim.step()
    except BaseException as error:
        for parameter in set(optim.state) - had_moments:
            del optim.state[parameter]
        if not isinstance(error, RuntimeError | TypeError) or is_out_of_memory(error):
            raise
        raise ConfigError(
            f"carrying an optimizer: {type(optim).__name__} cannot make its moments in a step with zero gradients "
            f"({error}), expected one that can; make them before job.carry, or carry another optimizer"
        ) from error
    finally:
        for group, rate in zip(optim.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def check_can_be_made(optim: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` for a fresh optimizer whose moments could not be made on a new mesh.

    It tries with its smallest parameter, and leaves the optimizer fresh.
    """
    trainable = [one for group in optim.param_groups for one in group["params"] if one.requires_grad]
    if trainable and not optim.state:
        take_empty_step(optim, [min(trainable, key=torch.Tensor.numel)])
        optim.state.clear()


def check_state_is_its_own(name: str, optim: torch.optim.Optimizer) -> None:
    """Raise `ConfigError` for an optimizer that keeps state outside ``state``: it would be lost in silence."""
    found = _describe_other_state(optim)
    if found is not None:
        raise ConfigError(f"carrying optimizer {name!r}: {type(optim).__name__} {found}, {_ADVICE}")


def _describe_other_state(optim: torch.optim.Optimizer) -> str | None:
    """The state outside of ``state`` and ``param_groups``, in words; None if none is found."""
    parameters = [one for group in optim.param_groups for one in group["params"]]
    known = {id(one) for one in parameters} | {id(one.grad) for one in parameters}
    shapes = {tuple(one.shape) for one in parameters if one.numel() > 1}
    rest = {key: one for key, one in vars(optim).items() if key not in ("state", "param_groups", "defaults")}
    for key, one in _walk(rest):
        if isinstance(one, torch.optim.Optimizer) and one.state is not optim.state:
            return f"keeps the state of another optimizer, {type(one).__name__}, in its attribute {key!r}"
        if isinstance(one, torch.Tensor) and id(one) not in known and tuple(one.shape) in shapes:
            return f"keeps a tensor of shape {tuple(one.shape)}, as large as a parameter, in its attribute {key!r}"
    if type(optim).state_dict is torch.optim.Optimizer.state_dict:
        return None
    try:
        extra = optim.state_dict().keys() - {"state", "param_groups"}
    except RuntimeError as error:
        return f"cannot give its state ({error})"
    return f"keeps {', '.join(sorted(map(repr, extra)))} in its state_dict as well" if extra else None


def _walk(values: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Optimizers and tensors in nested lists and dicts, each with the attribute that leads there."""
    if isinstance(values, torch.Tensor | torch.optim.Optimizer):
        yield key, values
    elif depth < _MAX_DEPTH and isinstance(values, dict):
        for name, one in values.items():
            yield from _walk(one, key or str(name), depth + 1)
    elif depth < _MAX_DEPTH and isinstance(values, list | tuple | set):
        for one in values:
            yield from _walk(one, key, depth + 1)
