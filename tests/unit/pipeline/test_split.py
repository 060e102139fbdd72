"""Stages cut from a model do together what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from remesh.pipeline.graph import Tie
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.split import Parts, split_model

WIDTH = 4


class UShape(nn.Module):
    """Down and up again, with a skip from each level to its mirror image, a weight by itself, and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.downs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.downs:
            x = torch.relu(down(x))
            skips.append(x)
        x = x * self.gain
        for up in self.ups:
            x = up(torch.cat([x, skips.pop()], 1)) + shift
        return x


def run_parts(parts: Parts, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    values: dict[str, torch.Tensor] = {}
    for stage, (module, entries) in enumerate(zip(parts.modules, parts.entries, strict=True)):
        taken = {edge.name: values[edge.name] for edge in parts.graph.edges_into(stage)}
        made = module(**taken, **{name: arguments[name] for name in entries})
        values |= made if isinstance(made, dict) else {"": made}
    return values[""]


@pytest.mark.parametrize("at", [[], ["ups.0"], ["downs.1", "ups.0", "ups.2"], ["downs.1", "downs.2", "ups.1"]])
def test_stages_do_what_the_model_does_and_keep_its_names(at: list[str]) -> None:
    model = UShape()
    arguments = {"x": torch.randn(3, WIDTH), "shift": torch.randn(3, WIDTH)}
    parts = split_model(model, at)
    assert torch.equal(run_parts(parts, arguments), model(**arguments))
    names = [name for module in parts.modules for name, _ in module.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_value_goes_straight_to_every_stage_that_uses_it() -> None:
    parts = split_model(UShape(), ["downs.2", "ups.0", "ups.1"])
    ends = {(edge.source, edge.target) for edge in parts.graph.edges}
    assert ends == {(0, 1), (1, 2), (2, 3), (0, 3)}  # the skip of downs.1 is joined where ups.1 uses it
    assert parts.entries == (("x",), (), ("shift",), ("shift",))


class Tied(nn.Module):
    """Uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.other(self.layer(x)))


def tied_by_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def tied_by_memory(see: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Two parameters, each of which is trained by itself once the stages are apart."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = nn.Parameter(see(model[0].weight.detach()))
    return model


def sides_of_one_buffer() -> nn.Module:
    buffer = torch.zeros(WIDTH, 2 * WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for at, half in zip((0, 2), buffer.chunk(2, 1), strict=True):
        model[at].weight = nn.Parameter(half)
    return model


def test_a_parameter_of_several_stages_is_a_tie_of_the_graph() -> None:
    ties = split_model(Tied(), ["other"]).graph.ties
    assert ties == tuple(Tie(((0, name), (1, name))) for name in ("layer.weight", "layer.bias"))
    assert split_model(tied_by_weight(), ["1"]).graph.ties == (Tie(((0, "0.weight"), (1, "2.weight"))),)
    assert not split_model(UShape(), ["ups.0"]).graph.ties


@pytest.mark.parametrize(
    "model", [sides_of_one_buffer(), tied_by_memory(torch.clone), tied_by_memory(torch.clone).to("meta")]
)
def test_parameters_that_share_no_byte_may_be_in_two_stages(model: nn.Module) -> None:
    assert split_model(model, ["1"]).graph.num_stages == 2


@pytest.mark.parametrize(
    ("model", "at", "told"),
    [
        (
            tied_by_memory(lambda weight: weight),
            ["1"],
            "'0.weight' in stage 0 and '2.weight' in stage 1 lie in one mem",
        ),
        (tied_by_memory(torch.t), ["1"], "'0.weight' in stage 0 and '2.weight' in stage 1 lie in one memory"),
        (tied_by_memory(lambda weight: weight[1:]), ["2"], "'0.weight' in stage 0 and '2.weight' in stage 1 lie in"),
        (UShape(), "middle", r"found the text 'middle', expected a list; write \['middle'\]"),
        (UShape(), ["ups.0", "downs.1"], "stage 2 is to begin at 'downs.1'"),
        (UShape(), ["middle"], "stage 1 is to begin at 'middle'"),
    ],
)
def test_cuts_that_cannot_be_are_refused(model: nn.Module, at: Sequence[str], told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        split_model(model, at)


class Doing(nn.Module):
    """Two layers, and what a model does between them, outside of any module."""

    def __init__(self, between: Callable[[Doing, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between = between
        self.calls = 0
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        made = self.between(self, h)
        return self.second(torch.cat([h, made], 1))


def counts_in_a_buffer(model: Doing, h: torch.Tensor) -> torch.Tensor:
    model.count.add_(1)
    return h * model.count


def counts_over_operators(model: Doing, h: torch.Tensor) -> torch.Tensor:
    model.count += 1
    model.count += 1
    return h * model.count


def uses_a_constant(model: Doing, h: torch.Tensor) -> torch.Tensor:
    return h + torch.arange(WIDTH)


def looks_up_what_is_made_of_a_buffer(model: Doing, h: torch.Tensor) -> torch.Tensor:
    return h * (model.scale * 2)


def writes_what_was_joined_before(model: Doing, h: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([h, h], 1)
    h.view(-1).mul_(2.0)
    return joined[:, :WIDTH]


def writes_over_operators(model: Doing, h: torch.Tensor) -> torch.Tensor:
    joined = torch.stack([h])
    h *= 3.0
    return joined[0]


@pytest.mark.parametrize(
    "between",
    [
        counts_in_a_buffer,
        counts_over_operators,
        uses_a_constant,
        looks_up_what_is_made_of_a_buffer,
        writes_what_was_joined_before,
        writes_over_operators,
    ],
)
def test_what_is_done_between_modules_is_done_at_each_call(between: Callable[..., torch.Tensor]) -> None:
    model, oracle = Doing(between), Doing(between)
    parts = split_model(model, ["second"])
    for call in range(3):
        x = torch.full((2, WIDTH), float(call))
        assert torch.equal(run_parts(parts, {"x": x}), oracle(x))
        with torch.no_grad():
            model.scale.add_(1), oracle.scale.add_(1)
    assert torch.equal(model.count, oracle.count)


def counts_in_an_attribute(model: Doing, h: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return h


def keeps_a_value(model: Doing, h: torch.Tensor) -> torch.Tensor:
    model.kept = h
    return h


def draws(model: Doing, h: torch.Tensor) -> torch.Tensor:
    return h + torch.rand(WIDTH)


def adds_up_in_a_constant(model: Doing, h: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(WIDTH)
    total.add_(h.sum(0))
    return h + total


def counts_anew(model: Doing, h: torch.Tensor) -> torch.Tensor:
    model.count = model.count + 1
    return h * model.count


def asks_for_values(model: Doing, h: torch.Tensor) -> torch.Tensor:
    return h if h.sum() > 0 else -h


@pytest.mark.parametrize(
    ("between", "told"),
    [
        (counts_in_an_attribute, "its forward changes calls outside of the modules"),
        (keeps_a_value, "its forward changes kept outside of the modules"),
        (draws, "its forward changes random numbers, which it draws"),
        (adds_up_in_a_constant, "its forward changes a constant, by add_"),
        (counts_anew, "its forward changes count outside of the modules"),
        (asks_for_values, "its forward cannot be traced down to the cuts .TraceError"),
    ],
)
def test_what_only_a_call_can_do_is_refused_and_put_back(between: Callable[..., torch.Tensor], told: str) -> None:
    model = Doing(between)
    before = dict(vars(model))
    with pytest.raises(PipelineError, match=told):
        split_model(model, ["second"])
    after = {name: one for name, one in vars(model).items() if not name.startswith("_tensor_constant")}
    assert after == before and not model.count
