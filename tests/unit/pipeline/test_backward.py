"""A backward in two parts gives the bits of the whole one, with this version of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from remesh.pipeline.backward import Roots, own_outputs, run_backward, run_input_backward, run_weight_backward

WIDTH = 5
Function = Callable[[nn.Module, torch.Tensor], dict[str, torch.Tensor]]


class Weights(nn.Module):
    """What the functions below use, some of it or all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lone = nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.double()


FUNCTIONS: dict[str, Function] = {
    "a chain": lambda w, x: {"y": w.two(torch.tanh(w.one(x)))},
    "a residual and a norm": lambda w, x: {"y": w.norm(x + w.one(x)) * w.frozen},
    "one weight used twice": lambda w, x: {"y": w.two(torch.tanh(w.one(torch.tanh(w.two(w.one(x))))))},
    "two outputs": lambda w, x: {"y": w.one(x), "z": torch.sin(w.two(x))},
    "an output that is a view": lambda w, x: {"y": w.one(x).t(), "z": w.one(x)[1:]},
    "a weight apart from the input": lambda w, x: {"y": w.one(x), "z": torch.exp(w.lone)},
    "a weight that joins late": lambda w, x: {"y": w.one(x) + w.two(w.lone)},
    "an input that nothing depends on": lambda w, x: {"y": w.one(w.lone)},
    "an input passed through": lambda w, x: {"y": x * 1.0, "z": w.one(x)},
}


def outputs_of(function: Function, weights: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return x, own_outputs(function(weights, x))


def gradients_for(outputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(one.shape, dtype=one.dtype, generator=generator) for one in outputs.values()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_parts_are_the_whole(name: str) -> None:
    whole, split = Weights(), Weights()
    for _ in range(2):  # the second time gradients are added to those that are there
        x, outputs = outputs_of(FUNCTIONS[name], whole)
        (expected,) = run_backward(Roots(list(outputs.values()), gradients_for(outputs)), [x])
        x, outputs = outputs_of(FUNCTIONS[name], split)
        roots = Roots(list(outputs.values()), gradients_for(outputs))
        (found,), rest = run_input_backward(roots, [x], list(split.parameters()))
        assert (found is None) == (expected is None)
        assert found is None or expected is None or torch.equal(found, expected)
        assert x.grad is None
        run_weight_backward(rest)
    for (weight, one), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), weight
        assert one.grad is None or torch.equal(one.grad, other.grad), weight  # type: ignore[arg-type]


def test_the_first_part_leaves_the_weights_alone() -> None:
    weights = Weights()
    x, outputs = outputs_of(FUNCTIONS["a residual and a norm"], weights)
    _, rest = run_input_backward(Roots([outputs["y"].sum()], None), [x], list(weights.parameters()))
    assert all(weight.grad is None for weight in weights.parameters())
    run_weight_backward(rest)
    assert weights.one.weight.grad is not None


def test_a_stage_without_inputs_does_everything_in_the_second_part() -> None:
    weights = Weights()
    made = weights.one(torch.ones(2, WIDTH, dtype=torch.float64))
    found, rest = run_input_backward(Roots([made], [torch.ones_like(made)]), [], list(weights.parameters()))
    assert found == [] and weights.one.weight.grad is None
    run_weight_backward(rest)
    assert weights.one.weight.grad is not None
