"""How is a backward taken in two parts? The one place that knows torch's stage backward functions.

Definitions. The *whole* backward of a stage computes the gradients of its inputs and of its weights at once. Split, its
first part computes those of the inputs, for which stages before wait, and leaves a `Rest`, from which the second part
computes those of the weights, for which nobody waits. Gradients of weights are added to ``.grad`` either way, and are
the same bits.

What torch's functions leave open, and what is done here:

- An output that is a view cannot be let go in place: `own_outputs` makes those their own tensors.
- A stage without inputs that have gradients (the first one) has no first part: the rest is the whole backward.
- Weights that reach an output by no way that an input goes are in none of torch's groups: theirs are computed in the
  first part.

The functions are private to torch, 2.11 to 2.13 (`remesh.torch_private`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remesh.torch_private import is_view
from remesh.torch_private import stage_backward as _torch

Gradients = list[torch.Tensor | None]
"""One for each input; None for an input that has none, or that nothing depends on."""


@dataclass(slots=True)
class Rest:
    """The part of a backward that is still to be done, once."""

    weights: Sequence[torch.nn.Parameter]
    groups: list[dict[str, Any]] | None
    """As torch's functions hand them on; None when all of the backward is still to be done."""
    roots: Roots


@dataclass(frozen=True, slots=True)
class Roots:
    """Where a backward begins."""

    outputs: Sequence[torch.Tensor]
    """Invariant: require grad, are no views."""
    gradients: Sequence[torch.Tensor] | None
    """One for each output; None when the outputs are one loss."""


def own_outputs(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of a stage, views replaced by copies that can be let go of."""
    return {name: value.clone() if is_view(value) else value for name, value in outputs.items()}


def run_backward(roots: Roots, inputs: Sequence[torch.Tensor]) -> Gradients:
    """The whole backward; the gradients of the inputs."""
    if not roots.outputs:
        return [None] * len(inputs)
    gradients = None if roots.gradients is None else list(roots.gradients)
    torch.autograd.backward(list(roots.outputs), gradients)
    found: Gradients = []
    for value in inputs:
        found.append(value.grad)
        value.grad = None
    return found


def run_input_backward(
    roots: Roots, inputs: Sequence[torch.Tensor], weights: Sequence[torch.nn.Parameter]
) -> tuple[Gradients, Rest]:
    """The first part: the gradients of the inputs, and what is left to be done."""
    trained = [weight for weight in weights if weight.requires_grad]
    if not roots.outputs or not any(value.requires_grad for value in inputs):
        return [None] * len(inputs), Rest(trained, None, roots)
    # Aliases keep the graph when torch lets go of the outputs.
    aliases = [value.view_as(value) for value in roots.outputs]
    found, groups = _torch.stage_backward_input(
        list(roots.outputs), None if roots.gradients is None else list(roots.gradients), list(inputs), iter(trained)
    )
    for value in inputs:
        value.grad = None
    _add_ungrouped(Roots(aliases, roots.gradients), trained, groups)
    return list(found), Rest(trained, groups, Roots((), ()))


def run_weight_backward(rest: Rest) -> None:
    """The second part: add the gradients of the weights."""
    if rest.groups is None:
        run_backward(rest.roots, ())
    else:
        # A weight that no output depends on has no group, and no gradient.
        reached = [group for group in rest.groups if "grads" in group]
        # From a weight that is used twice, a way leads through other weights' nodes: they must outlive it.
        is_shared = any(len(group["intermediates"]) > 1 for group in reached)
        _torch.stage_backward_weight(iter(rest.weights), reached, retain_graph=is_shared)
    rest.groups, rest.roots = [], Roots((), ())


def _add_ungrouped(roots: Roots, weights: Sequence[torch.nn.Parameter], groups: Sequence[dict[str, Any]]) -> None:
    """Add the gradients of weights that reach the outputs, but by no way that an input goes."""
    grouped = {node for group in groups for node in group["params"]}
    lone = [weight for weight in weights if _torch._get_grad_fn_or_grad_acc(weight) not in grouped]
    if not lone:
        return
    gradients = torch.autograd.grad(
        roots.outputs,
        lone,
        None if roots.gradients is None else list(roots.gradients),
        retain_graph=True,
        allow_unused=True,
    )
    for weight, gradient in zip(lone, gradients, strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
