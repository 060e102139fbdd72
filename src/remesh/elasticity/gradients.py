"""Gradients that are part of a step's state: those that a program accumulates over several commits.

At the end of a step a gradient either has been used up (its optimizer moved the parameter; what is left will be set to
zero) or waits for more. What waits is state like any other: named after its parameter, with its layout. A copy is kept,
for the next batch adds to the gradient itself before all ranks have voted on it.

A gradient that ranks have not added up yet is no such box: each holds another part of it, which dies with its rank. So
ranks that hold the same box compare what they have (:func:`find_unlike`), once in each generation that accumulates.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from remesh.foundation.errors import ConfigError
from remesh.foundation.torch_private import FSDP_MODULE, check_members, holds_unreduced_gradients
from remesh.layout.from_torch import piece_of

check_members(FSDP_MODULE)

SUFFIX = ".grad"
ADVICE = (
    "let every backward pass add up gradients over ranks (no no_sync(), no set_requires_gradient_sync(False) beyond "
    "one batch), or accumulate inside one batch: cut it up, and commit once for all of it"
)
_NUM_SAMPLES = 16
_TOLERANCE = 1e-3
"""Replicas that computed one gradient by themselves may differ in rounding; parts of one differ in everything."""


class Gradients:
    """The gradients of some models that outlive a commit."""

    def __init__(self, models: Mapping[str, nn.Module], optims: Collection[torch.optim.Optimizer]) -> None:
        self._models = models
        self._parameters = dict(_named_gradients(models))
        self._kept: dict[str, torch.Tensor] = {}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._stepped: set[str] = set()
        """Gradients that an optimizer has used since they were last looked at."""
        self._owned: set[str] = set()
        """Gradients of parameters that one of the optimizers moves."""
        self._versions: list[int] = []
        """How often each of the other parameters was written to when gradients were last looked at."""
        ours = weakref.ref(self)

        def note_step(optim: torch.optim.Optimizer, *_: Any) -> None:
            if (found := ours()) is not None:
                found._stepped |= found._names_of(optim)

        for optim in optims:
            self._owned |= self._names_of(optim)
            optim.register_step_post_hook(note_step)
        self.settle()

    @property
    def is_accumulating(self) -> bool:
        """Whether the last step left gradients that wait for more."""
        return bool(self._kept)

    def settle(self) -> None:
        """What was written into parameters until now used no gradient up: it was filled in."""
        self._versions = self._versions_of_others()
        self._stepped = set()

    def keep(self) -> None:
        """Copy the gradients that wait for more batches, at the end of a step."""
        waiting = self._find_waiting()
        self.settle()
        self._check_reduced(waiting)
        present = {name: one.grad for name, one in self._parameters.items() if name in waiting and one.grad is not None}
        self._kept = {name: gradient.detach().clone() for name, gradient in present.items()}

    def _find_waiting(self) -> set[str]:
        """The gradients that nothing has used up, whether they are there or not.

        An optimizer uses up those of its own parameters: another one beside it may step at other commits, and what is
        written into parameters in place, to clip them, is no step. Parameters of no optimizer are moved by what the
        program does with all of them; theirs are used up when one is written to, or any optimizer steps.
        """
        waiting = self._owned - self._stepped
        if not self._stepped and self._versions == self._versions_of_others():
            waiting |= self._parameters.keys() - self._owned
        return waiting

    def _versions_of_others(self) -> list[int]:
        return [one._version for name, one in self._parameters.items() if name not in self._owned]

    def _names_of(self, optim: torch.optim.Optimizer) -> set[str]:
        parameters = (one for group in optim.param_groups for one in group["params"])
        return {self._names[id(one)] for one in parameters if id(one) in self._names}

    def tensors(self) -> dict[str, torch.Tensor]:
        """What was kept, by name."""
        return self._kept

    def allocate(self, wanted: Collection[str]) -> None:
        """Make exactly those gradients that ``wanted`` names, to be filled afterwards."""
        for name in self._kept.keys() - wanted:
            self._parameters[name].grad = None
        self._kept = {}
        self.make(wanted)

    def lacking(self) -> dict[str, torch.nn.Parameter]:
        """The parameters without a kept gradient, by the gradient's name."""
        return {name: parameter for name, parameter in self._parameters.items() if name not in self._kept}

    def make(self, wanted: Collection[str]) -> None:
        """Make those that ``wanted`` names and that are not there, to be filled afterwards."""
        for name, parameter in self.lacking().items():
            if name in wanted:
                parameter.grad = torch.zeros_like(parameter)
                self._kept[name] = parameter.grad.detach()

    def drop(self) -> None:
        """Forget what a step that came to nothing has added up; what was kept before is still there."""
        for model in self._models.values():
            model.zero_grad(set_to_none=True)

    def describe(self) -> dict[str, Any]:
        """What was kept, for :func:`find_unlike`."""
        return describe_values(self._kept)

    def _check_reduced(self, waiting: Collection[str]) -> None:
        for name, model in self._models.items():
            part: nn.Module
            for path, part in model.named_modules():
                if not isinstance(part, FSDPModule) or not holds_unreduced_gradients(part):
                    continue
                # By name: what FSDP has not added up yet it shows as parameters of their whole size.
                named = _named_gradients({f"{name}.{path}" if path else name: part})
                own = {key for key, one in named if one.requires_grad}
                if not own.isdisjoint(waiting):
                    raise ConfigError(
                        f"keeping the gradients of {name}.{path or 'all of it'} over a commit: FSDP has not added them "
                        f"up over its ranks yet, and a rank that fails would lose its part; {ADVICE}"
                    )


def _named_gradients(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of some models, by the names of their gradients."""
    for name, model in models.items():
        for path, parameter in model.named_parameters():
            yield f"{name}.{path}{SUFFIX}", parameter


def describe_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """JSON of some elements and the size of every box, for :func:`find_unlike`; partial sums rightly differ."""
    described = {}
    for name, tensor in tensors.items():
        piece = piece_of(tensor)
        if piece.partial is not None or piece.tensor.is_complex():
            continue
        flat = piece.tensor.detach().reshape(-1).double()
        some = flat[:: max(1, flat.numel() // _NUM_SAMPLES)].tolist()
        boxes = [[list(part) for part in (shard.box.start, shard.box.stop)] for shard in piece.shards]
        described[name] = {"boxes": boxes, "some": [*some, float(flat.norm())]}
    return described


def find_unlike(by_rank: Sequence[Mapping[str, Any]]) -> tuple[str, int, int] | None:
    """A tensor of which two ranks hold the same boxes with other values, and these ranks; None if there is none.

    ``by_rank`` has what :func:`describe_values` returned on each rank.
    """
    first: dict[tuple[str, str], tuple[int, Sequence[float]]] = {}
    for rank, each in enumerate(by_rank):
        for name, one in each.items():
            other, values = first.setdefault((name, str(one["boxes"])), (rank, one["some"]))
            scale = max(map(abs, (*values, *one["some"])))
            if any(abs(a - b) > _TOLERANCE * scale for a, b in zip(values, one["some"], strict=True)):
                return name, other, rank
    return None
