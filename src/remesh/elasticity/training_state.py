"""Carried state: models, optimizers and other stateful objects as named tensors and plain values, and back.

*Tensors* (parameters, buffers, optimizer moments) are known by name and by the boxes this rank keeps of them; they move
by reshard plans. *Values* (learning rates, schedulers' counters, a module's extra state) are equal on all ranks that
have them, and move as text (:mod:`remesh.elasticity.typed_values`).

What would not come back is refused, by name: when it is carried first (:meth:`CarriedState.prove`), after the first
step (:meth:`CarriedState.check_kept`), and whenever a mesh is filled (:meth:`CarriedState.check_made`).

Optimizer state is named by the parameter it belongs to, ``optim.state.<parameter>.<moment>``, so that it finds its
parameter again on any mesh; likewise a gradient that waits for more, ``<parameter>.grad``.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from remesh.elasticity.gradients import Gradients, describe_values, find_unlike
from remesh.elasticity.optimizers import check_can_be_made, check_state_is_its_own, take_empty_step
from remesh.elasticity.typed_values import decode, encode, find_difference, merge_values
from remesh.foundation.errors import ConfigError
from remesh.layout.from_torch import Piece, piece_of

POSITION = "(position)"
"""Name of the value with the job's position in all that it reads (:mod:`remesh.elasticity.training.position`)."""
EXTRA_STATE = "_extra_state"
"""The key of what a module's ``get_extra_state`` gives in its state_dict."""


class Moment(NamedTuple):
    """What boxes that go together have in common, in the order of time."""

    line: int
    step: int
    mark: int = 0
    """What happened since the step, counted; changes plain values alone."""

    def has(self, other: Moment) -> bool:
        """Whether this is the other one, or a later one of the same step."""
        return self[:2] == other[:2] and self.mark >= other.mark


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state that a worker keeps between two generations."""

    step: int
    """Batches resolved in this state."""
    samples: int
    pieces: dict[str, Piece]
    values: dict[str, str]
    """Each value's text, by name."""
    line: int = 0
    """The generation in which the job last began or went back; boxes of two lines do not go together."""

    @property
    def moment(self) -> Moment:
        """What its boxes belong to."""
        text = self.values.get(POSITION)
        return Moment(self.line, self.step, 0 if text is None else int(json.loads(text)["mark"]))


@dataclass(frozen=True, slots=True)
class PlainSettings:
    """Plain values as they were at one time; read at every step, and seldom asked for."""

    known: Mapping[str, str]
    """Texts by name."""
    groups: Mapping[str, Sequence[Mapping[str, Any]]]
    """Options of groups of parameters, by name."""

    def texts(self) -> dict[str, str]:
        """All of them, by name."""
        options = {
            name: [{key: one for key, one in group.items() if key != "params"} for group in groups]
            for name, groups in self.groups.items()
        }
        return {**self.known, **{name: encode(name, one) for name, one in options.items()}}


class CarriedState:
    """The objects that a training function asked to carry, by name."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.is_torn = False
        """Whether tensors are being overwritten that hold the state of another step."""
        self.is_new = True
        """Whether the objects are as the program made them: nothing was filled in, and no step taken."""
        self.in_doubt: HeldState | None = None
        """What these objects were filled with, and what was held before, where a rank was lost before this one learned
        that all were filled: others may hold either."""
        self._allocated: list[torch.optim.Optimizer] = []
        self._models = {
            name: one for name, one in objects.items() if isinstance(one, nn.Module) and not _gives_values(one)
        }
        self._optims = {name: one for name, one in objects.items() if isinstance(one, torch.optim.Optimizer)}
        self._others = {name: one for name, one in objects.items() if name not in {*self._models, *self._optims}}
        for name, one in self._others.items():
            if not (isinstance(one, torch.Tensor) or (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))):
                raise ConfigError(
                    f"carrying {name!r}: expected a module, an optimizer, a tensor, or an object with state_dict and "
                    f"load_state_dict, found {type(one).__name__}; wrap it in such an object"
                )
        self._with_extra_state = {
            ".".join(filter(None, (name, path, EXTRA_STATE))): module
            for name, model in self._models.items()
            for path, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
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
            found |= _tensors_of_model(name, model)
        for name, optim in self._optims.items():
            for parameter, path in self._parameters_of(name, optim):
                moments = optim.state.get(parameter, {})
                found |= {
                    f"{name}.state.{path}.{key}": one for key, one in moments.items() if isinstance(one, torch.Tensor)
                }
        others = {name: one for name, one in self._others.items() if isinstance(one, torch.Tensor)}
        return found | others | self.gradients.tensors()

    def values(self) -> dict[str, str]:
        """The texts of all plain values, by name."""
        return self.settings().texts() | self.plain_moments()

    def settings(self) -> PlainSettings:
        """Those that a program may change between two steps: of objects, groups of parameters, extra state."""
        extra = {name: encode(name, one.get_extra_state()) for name, one in self._with_extra_state.items()}
        groups = {
            f"{name}.param_groups": [{**group} for group in one.param_groups] for name, one in self._optims.items()
        }
        return PlainSettings(extra | {name: encode(name, one.state_dict()) for name, one in self._stateful()}, groups)

    def plain_moments(self) -> dict[str, str]:
        """Those that optimizers change in their steps alone."""
        found = {}
        for name, optim in self._optims.items():
            for parameter, path in self._parameters_of(name, optim):
                moments = optim.state.get(parameter, {})
                plain = {key: one for key, one in moments.items() if not isinstance(one, torch.Tensor)}
                if plain:
                    key = f"{name}.state.{path}"
                    found[key] = encode(key, plain)
        return found

    def set_values(self, values: Mapping[str, str]) -> None:
        """Put plain values back; tensors are filled in place elsewhere. ConfigError where they do not stay as put."""
        for name, optim in self._optims.items():
            saved_groups = decode(values[f"{name}.param_groups"])
            if len(saved_groups) != len(optim.param_groups):
                raise ConfigError(
                    f"carrying {name!r}: its state has {len(saved_groups)} parameter groups, the optimizer has "
                    f"{len(optim.param_groups)}; build it with the same groups on every mesh"
                )
            for group, saved in zip(optim.param_groups, saved_groups, strict=True):
                group.update({key: _into(group.get(key), one) for key, one in saved.items()})
            for parameter, path in self._parameters_of(name, optim):
                if (text := values.get(f"{name}.state.{path}")) is not None:
                    optim.state[parameter].update(decode(text))
        for name, module in self._with_extra_state.items():
            module.set_extra_state(decode(values[name]))
            _check_came_back(name, values[name], encode(name, module.get_extra_state()))
        for name, one in self._stateful():
            one.load_state_dict(decode(values[name]))
            _check_came_back(name, values[name], encode(name, one.state_dict()))

    def prove(self) -> None:
        """Raise `ConfigError` for objects of a new job that could not be filled on another mesh."""
        empty = [name for name, one in self._stateful() if isinstance(one, nn.Module) and not one.state_dict()]
        if empty:
            raise ConfigError(
                f"carrying {empty[0]!r}: its state_dict is empty, expected its state; a metric of torchmetrics gives "
                "it after persistent(True)"
            )
        self.set_values(self.values())
        for name, optim in self._optims.items():
            check_state_is_its_own(name, optim)
            check_can_be_made(optim)

    def check_kept(self) -> None:
        """Raise `ConfigError` for optimizers whose steps have made state that is not carried."""
        for name, optim in self._optims.items():
            check_state_is_its_own(name, optim)

    def check_made(self, wanted: Collection[str]) -> None:
        """Raise `ConfigError` for a moment that is wanted of an own parameter, and that no step has made."""
        there = self.tensors().keys()
        for name, optim in self._optims.items():
            for parameter, path in self._parameters_of(name, optim):
                unit = f"{name}.state.{path}"
                lost = [one for one in wanted if one not in there and one.rpartition(".")[0] == unit]
                if lost:
                    made = sorted(map(str, optim.state.get(parameter, {})))
                    raise ConfigError(
                        f"carrying optimizer {name!r}: {type(optim).__name__} made {made} for {path!r} in a step with "
                        f"zero gradients, expected {lost[0]!r} as well, which the job's state has; carry an optimizer "
                        "that makes all its moments in its first step"
                    )

    def describe(self) -> dict[str, Any]:
        """JSON of what ranks must have alike, for :meth:`check_alike`."""
        tensors = {name: one for name, one in self._others.items() if isinstance(one, torch.Tensor)}
        return {"values": self.values(), "tensors": describe_values(tensors)}

    def check_alike(self, by_rank: Sequence[Mapping[str, Any]]) -> None:
        """Raise `ConfigError`, on all ranks alike, for what differs in ``by_rank``, the description that each sent."""
        merge_values([each["values"] for each in by_rank], self.streams)
        unlike = find_unlike([each["tensors"] for each in by_rank])
        if unlike is not None:
            name, one, other = unlike
            raise ConfigError(
                f"carrying {name!r}: ranks {one} and {other} hold the same part of this tensor with different values, "
                "and a rank that is lost would get another one's; make it equal everywhere, or a DTensor of parts"
            )

    @property
    def streams(self) -> frozenset[str]:
        """What ranks compare by a digest of what they read, for their iterables may describe one place in many ways."""
        return frozenset(name for name, one in self._others.items() if hasattr(one, "digest"))

    @property
    def optimizers(self) -> frozenset[str]:
        """The names of the optimizers."""
        return frozenset(self._optims)

    def watch(self, began: Callable[[str], None], stepped: Callable[[str], None]) -> None:
        """Call these with an optimizer's name, before and after each of its steps, as long as they are there."""
        hear_began, hear_stepped = weakref.WeakMethod(began), weakref.WeakMethod(stepped)
        for name, optim in self._optims.items():
            optim.register_step_pre_hook(partial(_notify, hear_began, name))
            optim.register_step_post_hook(partial(_notify, hear_stepped, name))

    def versions(self) -> dict[str, int]:
        """How often each tensor was written to, by name."""
        local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in self.tensors().items()}
        return {name: one._version for name, one in local.items() if not one.is_inference()}

    def _stateful(self) -> list[tuple[str, Any]]:
        return [(name, one) for name, one in self._others.items() if not isinstance(one, torch.Tensor)]

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
            # Of those that are wanted alone: a parameter that is frozen has none, and no rank could fill them.
            chosen = [one for unit, one in self._without_moments(name, optim).items() if unit in units]
            if chosen and not optim.state:
                take_empty_step(optim, chosen)
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
                take_empty_step(optim, lacking)
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


def _gives_values(module: nn.Module) -> bool:
    """Whether a module has a state_dict of its own, and no parameters or buffers: a metric, for instance."""
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return False
    return any(type(part).state_dict is not nn.Module.state_dict for part in module.modules())


def _tensors_of_model(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """What its state_dict names; ConfigError where that is not the module's own memory, which is filled in place."""
    found = {}
    entries = model.state_dict(keep_vars=True)
    # Only now: FSDP shards its parameters again before it gives them.
    own = {id(one) for one in (*model.parameters(), *model.buffers())}
    for path, tensor in entries.items():
        if path.rpartition(".")[2] == EXTRA_STATE:
            continue
        if id(tensor) not in own:
            raise ConfigError(
                f"carrying {name!r}: its state_dict has {path!r}, a {type(tensor).__name__} that is no parameter or "
                "buffer of the module; register it as one, give it by get_extra_state, or carry what makes it by itself"
            )
        found[f"{name}.{path}"] = tensor.detach()
    return found


def _check_came_back(name: str, put: str, found: str) -> None:
    if put != found:
        raise ConfigError(
            f"carrying {name!r}: its state is not what was put into it: {find_difference(put, found)}; let its "
            "load_state_dict take all that its state_dict gives"
        )


def _into(present: Any, saved: Any) -> Any:
    """An option of an optimizer; in the tensor that is there, which `torch.compile` knows."""
    return present.copy_(saved) if isinstance(present, torch.Tensor) and isinstance(saved, torch.Tensor) else saved


def _notify(listener: weakref.WeakMethod[Callable[[str], None]], name: str, *_: Any) -> None:
    if (hear := listener()) is not None:
        hear(name)
