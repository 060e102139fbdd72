"""A backward in two parts gives the bits of the whole one, with this version of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from remesh.pipeline.running.backward import Roots, begin_graph, run_backward, run_input_backward, run_weight_backward

WIDTH = 5
Outputs = dict[str, torch.Tensor]


class Weights(nn.Module):
    """What the functions below use, some of it or all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early = nn.Parameter(torch.randn(WIDTH))
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lone = nn.Parameter(torch.randn(WIDTH))
        self.flat = nn.Parameter(torch.randn(3 * WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.num_calls = 0
        self.double()

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.plain(x)


Function = Callable[[Weights, torch.Tensor], Outputs]
ONES = torch.ones(3, WIDTH, dtype=torch.float64)


def biases_before_a_shared_weight(w: Weights, x: torch.Tensor) -> Outputs:
    first = torch.tanh(functional.linear(x, w.one.weight, w.early))
    return {"y": functional.linear(first, w.one.weight, w.lone)}


def a_skip_that_is_made_and_used(w: Weights, x: torch.Tensor) -> Outputs:
    skip = w.one(x)
    return {"skip": skip, "y": torch.tanh(skip * w.lone)}


def a_hook_on_the_way(w: Weights, x: torch.Tensor) -> Outputs:
    hidden = w.one(x)
    hidden.register_hook(lambda gradient: gradient * 3)
    return {"y": w.two(torch.sin(hidden))}


def part_of_what_a_step_makes(w: Weights, x: torch.Tensor) -> Outputs:
    first, second = (x * w.lone).split([2, 3], dim=1)
    return {"y": torch.sin(second), "z": first.detach() * 2 + x[:, :2]}


def in_place(w: Weights, x: torch.Tensor) -> Outputs:
    made = functional.relu(x, inplace=True) * 2
    made[:, 0].mul_(w.lone[0])
    return {"y": made.add_(w.norm(made.clone()))}


FUNCTIONS: dict[str, Function] = {
    "a chain": lambda w, x: {"y": w.two(torch.tanh(w.one(x)))},
    "a residual and a norm": lambda w, x: {"y": w.norm(x + w.one(x)) * w.frozen},
    "one weight used twice": lambda w, x: {"y": w.two(torch.tanh(w.one(torch.tanh(w.two(w.one(x))))))},
    "one weight used twice, biases before it": biases_before_a_shared_weight,
    "one weight for the input and for a constant": lambda w, x: {"y": w.one(x), "z": w.one(ONES)},
    "one weight by itself and through another way": lambda w, x: {"y": torch.cat([x * w.lone, w.lone.exp()[None]])},
    "two outputs": lambda w, x: {"y": w.one(x), "z": torch.sin(w.two(x))},
    "one output twice": lambda w, x: dict.fromkeys("yz", w.one(x)),
    "an output that is a view": lambda w, x: {"y": w.one(x).t(), "z": w.one(x)[1:]},
    "an output that is made and used": a_skip_that_is_made_and_used,
    "an output that is a weight": lambda w, x: {"y": w.one(x) * w.lone, "z": w.lone},
    "a weight apart from the input": lambda w, x: {"y": w.one(x), "z": torch.exp(w.lone)},
    "a weight that joins late": lambda w, x: {"y": w.one(x) + w.two(w.lone)},
    "an input that nothing depends on": lambda w, x: {"y": w.one(w.lone)},
    "an input passed through": lambda w, x: {"y": x * 1.0, "z": w.one(x)},
    "an output that is the input": lambda w, x: {"y": x, "z": w.one(x)},
    "no weight": lambda w, x: {"y": torch.sin(x)},
    "gradients in one memory": lambda w, x: {"y": (x.view(-1) + w.flat).view(3, WIDTH)},
    "a hook on the way": a_hook_on_the_way,
    "part of what a step makes": part_of_what_a_step_makes,
    "in place": in_place,
    "checkpointed": lambda w, x: {"y": w.norm(checkpoint(w.counted, x, use_reentrant=False))},
    "checkpointed, reentrant": lambda w, x: {"y": w.norm(checkpoint(w.counted, x, use_reentrant=True))},
    "compiled": lambda w, x: {"y": torch.compile(w.plain, backend="aot_eager")(x) * w.lone},
}


def start(function: Function, weights: Weights) -> tuple[list[torch.Tensor], Roots]:
    """The leaf of the input, and where the backward of the function begins."""
    generator = torch.Generator().manual_seed(1)
    leaves, begun = begin_graph({"x": torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)})
    outputs = list(function(weights, begun["x"]).values())
    return list(leaves.values()), Roots(
        outputs, [torch.randn(one.shape, dtype=one.dtype, generator=generator) for one in outputs]
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "compiled" else []) for name in FUNCTIONS]
)
def test_two_parts_are_the_whole(name: str) -> None:
    whole, split = Weights(), Weights()
    for _ in range(2):  # the second time gradients are added to those that are there
        leaves, roots = start(FUNCTIONS[name], whole)
        (expected,) = run_backward(roots, leaves)
        leaves, roots = start(FUNCTIONS[name], split)
        (found,), rest = run_input_backward(roots, leaves)
        del roots
        sent = None if found is None else found.clone()
        run_weight_backward(rest)
        assert (found is None) == (expected is None)
        assert found is None or expected is None or torch.equal(found, expected)
        assert found is None or torch.equal(found, sent), "it is on its way, and changed"  # type: ignore[arg-type]
        assert leaves[0].grad is None and rest.starts == []
    for (weight, one), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), weight
        assert one.grad is None or torch.equal(one.grad, other.grad), weight  # type: ignore[arg-type]
    assert split.num_calls == whole.num_calls


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        ("a chain", set()),
        ("a residual and a norm", set()),
        ("in place", set()),
        ("one weight used twice, biases before it", {"one.weight"}),
        ("one weight for the input and for a constant", {"one.weight", "one.bias"}),
        ("checkpointed", {"one.weight", "one.bias", "two.weight", "two.bias"}),
        ("checkpointed, reentrant", {"one.weight", "one.bias", "two.weight", "two.bias", "norm.weight", "norm.bias"}),
        pytest.param("compiled", {"one.weight", "one.bias", "two.weight", "two.bias", "lone"}, marks=pytest.mark.slow),
    ],
)
def test_the_first_part_has_the_gradients_of_weights_that_cannot_wait_and_no_others(
    name: str, at_once: set[str]
) -> None:
    weights = Weights()
    leaves, roots = start(FUNCTIONS[name], weights)
    _, rest = run_input_backward(roots, leaves)
    assert {each for each, weight in weights.named_parameters() if weight.grad is not None} == at_once
    run_weight_backward(rest)
    assert weights.lone.grad is not None or weights.one.weight.grad is not None


def test_hooks_of_weights_see_the_whole_gradient_once() -> None:
    seen: list[str] = []
    weights = Weights()
    for name, weight in weights.named_parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))  # type: ignore[misc]
    leaves, roots = start(biases_before_a_shared_weight, weights)
    _, rest = run_input_backward(roots, leaves)
    run_weight_backward(rest)
    assert sorted(seen) == ["early", "lone", "one.weight"]


def test_a_stage_without_inputs_does_everything_in_the_second_part() -> None:
    weights = Weights()
    made = weights.one(ONES)
    found, rest = run_input_backward(Roots([made], [torch.ones_like(made)]), [])
    assert found == [] and weights.one.weight.grad is None
    run_weight_backward(rest)
    assert weights.one.weight.grad is not None
