"""What is carried? Turns models, optimizers and other stateful objects into named tensors and plain values, and back.

*Tensors* (parameters, buffers, optimizer moments) are known by name and by the boxes this rank keeps of them; they move
by reshard plans. *Values* (learning rates, schedulers' counters) are equal on all ranks and move as JSON.

Optimizer state is named by the parameter it belongs to, ``optim.state.<parameter>.<moment>``, so that it finds its
parameter again on any mesh; likewise a gradient that waits for more, ``<parameter>.grad``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from remesh.comm.gather import is_out_of_memory
from remesh.elasticity.gradients import Gradients
from remesh.foundation.errors import ConfigError
from remesh.layout.from_torch import Piece, piece_of

Value = Any
"""A JSON value."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state that a worker keeps between two generations."""

    step: int
    """Batches resolved in this state."""
    samples: int
    pieces: dict[str, Piece]
    values: dict[str, Value]
    line: int = 0
    """The generation in which the job last began or went back; boxes of two lines do not go together."""


class CarriedState:
    """The objects that a training function asked to carry, by name."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.is_torn = False
        """Whether tensors are being overwritten that hold the state of another step."""
        self.is_new = True
        """Whether the objects are as the program made them: nothing was filled in, and no step taken."""
        self.in_doubt: HeldState | None = None
        """What these objects were filled with, and what was held before, where a rank was lost before this one heard
        that all were filled: others may hold either."""
        self._allocated: list[torch.optim.Optimizer] = []
        self._models = {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
        self._optims = {name: one for name, one in objects.items() if isinstance(one, torch.optim.Optimizer)}
        self._others = {name: one for name, one in objects.items() if name not in {*self._models, *self._optims}}
        for name, one in self._others.items():
            if not (isinstance(one, torch.Tensor) or (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))):
                raise ConfigError(
                    f"carrying {name!r}: expected a module, an optimizer, a tensor, or an object with state_dict and "
                    f"load_state_dict, found {type(one).__name__}; wrap it in such an object"
                )
        self.gradients = Gradients(self._models, self._optims.values())
        self._parameter_names = {
            id(parameter): f"{name}.{path}"
            for name, model in self._models.items()
            for path, parameter in model.named_parameters()
        }

    @property
    def is_plain(self) -> bool:
        """Whether no module keeps process groups of its own, as FSDP and DDP do."""
        modules = (part for model in self._models.values() for part in model.modules())
        return not any(isinstance(part, FSDPModule | DistributedDataParallel) for part in modules)

    def kinds(self) -> dict[str, str]:
        """What each object is, by its name in quotes."""
        others = {
            name: "a tensor" if isinstance(one, torch.Tensor) else "an object" for name, one in self._others.items()
        }
        kinds = dict.fromkeys(self._models, "a module") | dict.fromkeys(self._optims, "an optimizer") | others
        return {repr(name): kind for name, kind in kinds.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name; the same storage that the objects use."""
        found: dict[str, torch.Tensor] = {}
        for name, model in self._models.items():
            found |= {f"{name}.{path}": tensor.detach() for path, tensor in model.state_dict(keep_vars=True).items()}
        for name, optim in self._optims.items():
            for parameter, path in self._parameters_of(name, optim):
                moments = optim.state.get(parameter, {})
                found |= {
                    f"{name}.state.{path}.{key}": one for key, one in moments.items() if isinstance(one, torch.Tensor)
                }
        others = {name: one for name, one in self._others.items() if isinstance(one, torch.Tensor)}
        return found | others | self.gradients.tensors()

    def values(self) -> dict[str, Value]:
        """All plain values by name."""
        found: dict[str, Value] = {}
        for name, optim in self._optims.items():
            groups = [
                {key: _plain(one) for key, one in group.items() if key != "params"} for group in optim.param_groups
            ]
            found[f"{name}.param_groups"] = _jsonable(f"{name}.param_groups", groups)
            for parameter, path in self._parameters_of(name, optim):
                moments = optim.state.get(parameter, {})
                plain = {key: one for key, one in moments.items() if not isinstance(one, torch.Tensor)}
                if plain:
                    found[f"{name}.state.{path}"] = _jsonable(f"{name}.state.{path}", plain)
        for name, one in self._others.items():
            if not isinstance(one, torch.Tensor):
                found[name] = _jsonable(name, one.state_dict())
        return found

    def set_values(self, values: Mapping[str, Value]) -> None:
        """Put plain values back; tensors are filled in place elsewhere."""
        for name, optim in self._optims.items():
            saved_groups = values[f"{name}.param_groups"]
            if len(saved_groups) != len(optim.param_groups):
                raise ConfigError(
                    f"carrying {name!r}: its state has {len(saved_groups)} parameter groups, the optimizer has "
                    f"{len(optim.param_groups)}; build it with the same groups on every mesh"
                )
            for group, saved in zip(optim.param_groups, saved_groups, strict=True):
                group.update({key: _like(group.get(key), one) for key, one in saved.items()})
            for parameter, path in self._parameters_of(name, optim):
                for key, one in values.get(f"{name}.state.{path}", {}).items():
                    optim.state[parameter][key] = one
        for name, one in self._others.items():
            if not isinstance(one, torch.Tensor):
                one.load_state_dict(values[name])

    def pieces(self, names: Collection[str] | None = None) -> dict[str, Piece]:
        """The place of each of this rank's tensors in its global tensor; of these tensors alone, if any are named."""
        return {name: piece_of(tensor) for name, tensor in self.tensors().items() if names is None or name in names}

    def num_bytes(self) -> int:
        """Of all tensors of this rank."""
        return sum(piece.tensor.nbytes for piece in self.pieces().values())

    def hold(self, step: int, samples: int, line: int) -> HeldState:
        """The state to keep while there are no process groups. The tensors are not copied."""
        return HeldState(step, samples, self.pieces(), self.values(), line)

    def allocate(self, wanted: Collection[str]) -> None:
        """Make fresh optimizers' moments and gradients that ``wanted`` names, to be filled afterwards."""
        units = {self.unit_of(key) for key in wanted}
        for name, optim in self._optims.items():
            # Of those that are wanted alone: a parameter that is frozen has none, and nobody could fill them.
            chosen = [one for unit, one in self._without_moments(name, optim).items() if unit in units]
            if chosen and not optim.state:
                _take_empty_step(optim, chosen)
                self._allocated.append(optim)
        self.gradients.allocate(frozenset(wanted))

    def forget_allocated(self) -> None:
        """Make optimizers fresh again that were only made to allocate."""
        for optim in self._allocated:
            optim.state.clear()
        self._allocated.clear()
        self.gradients.allocate(())

    def unit_of(self, name: str) -> str:
        """What a tensor can only be made together with: all moments of a parameter have one name here. The same on all
        ranks, whichever tensors they have."""
        is_moment = any(name.startswith(f"{optim}.state.") for optim in self._optims)
        return name.rpartition(".")[0] if is_moment else name

    def sizes_to_make(self, wanted: Collection[str]) -> dict[str, tuple[int, int]]:
        """By unit the elements of the parameters whose moments or gradients are wanted and not there: all, and this
        rank's."""
        units = {self.unit_of(name) for name in wanted}
        lacking: dict[str, torch.Tensor] = {**self.gradients.lacking()}
        for name, optim in self._optims.items():
            lacking |= self._without_moments(name, optim)
        found = {}
        for unit, parameter in lacking.items():
            if unit in units:
                piece = piece_of(parameter)
                found[unit] = (math.prod(piece.global_shape), piece.tensor.numel())
        return found

    def make(self, units: Collection[str]) -> None:
        """Make the moments and gradients of these units that are not there, to be filled afterwards."""
        for name, optim in self._optims.items():
            lacking = [one for unit, one in self._without_moments(name, optim).items() if unit in units]
            if lacking:
                _take_empty_step(optim, lacking)
        self.gradients.make(units)

    def _without_moments(self, name: str, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The parameters whose moments are not there, by unit."""
        own = self._parameters_of(name, optim)
        return {f"{name}.state.{path}": parameter for parameter, path in own if parameter not in optim.state}

    def _parameters_of(self, name: str, optim: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str]]:
        found = []
        for group in optim.param_groups:
            for parameter in group["params"]:
                path = self._parameter_names.get(id(parameter))
                if path is None:
                    raise ConfigError(
                        f"carrying optimizer {name!r}: it holds a parameter of shape {tuple(parameter.shape)} that is "
                        f"in none of the carried models {sorted(self._models)}; carry its model in the same call"
                    )
                found.append((parameter, path))
        return found


def _take_empty_step(optim: torch.optim.Optimizer, some: Collection[torch.Tensor]) -> None:
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


def _plain(option: Any) -> Any:
    """An option of an optimizer; a learning rate in a tensor, as for `torch.compile`, as its number."""
    return option.item() if isinstance(option, torch.Tensor) and option.numel() == 1 else option


def _jsonable(name: str, value: Any) -> Value:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"carrying {name!r}: its plain values must be JSON (numbers, strings, lists, dicts), found {error}; carry "
            "tensors by themselves and do not carry other objects"
        ) from error


def _like(present: Any, saved: Value) -> Any:
    """A saved value in the type that the object uses now: JSON has no tuples and no tensors."""
    if isinstance(present, tuple):
        return tuple(saved)
    if isinstance(present, torch.Tensor):
        return present.fill_(saved)
    return saved
