"""Random stage modules, one process that trains them, and all stages at work in one process by a schedule.

A stage is a list of steps drawn by a seed. What one process does with the same modules is the oracle: it knows neither
schedules nor stages, it calls one module after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from remesh.pipeline.actions import ActionKind
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.running.stage import Stage, StageWork, add_gradients, leaving_copy
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedule_check import order_of_progress

SAMPLES, WIDTH = 3, 4
NUM_STEPS = 9
Values = dict[str, torch.Tensor]


class Scaled(torch.autograd.Function):
    """A function of a program's own: scales rows, and counts how often its backward ran."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: torch.Tensor, runs: list[int]) -> torch.Tensor:
        ctx.save_for_backward(value, scale)
        ctx.runs = runs
        return value * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        value, scale = ctx.saved_tensors
        ctx.runs[0] += 1
        return gradients[0] * scale, (gradients[0] * value).sum(0), None


class Weights(nn.Module):
    """What the steps of a stage use: some of it often, some never."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(chance.getrandbits(30))

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)

        # Biases before what they are added to, as well as after.
        self.vectors = nn.ParameterList(draw(WIDTH) for _ in range(2))
        self.matrices = nn.ParameterList(draw(WIDTH, WIDTH) for _ in range(2))
        self.flat = draw(SAMPLES * WIDTH)
        self.unused = draw(WIDTH)
        self.matrices[1].requires_grad_(chance.random() < 0.8)
        self.vectors[1].requires_grad_(chance.random() < 0.9)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.runs = [0]
        if chance.random() < 0.2 and self.vectors[1].requires_grad:
            self.vectors[1].register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def block(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """What is checkpointed."""
        self.num_calls += 1
        inner = functional.linear(torch.tanh(value * self.vectors[0]), self.matrices[number], self.vectors[number])
        return value + torch.sin(inner)


def _in_place(w: Weights, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    made = a * 1.5
    made[:, 0].mul_(2.0)
    made.add_(w.vectors[number])
    made[1:] += torch.sin(b[1:])
    return torch.tanh(made)


def _shared_branch(w: Weights, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    branch = torch.exp(w.vectors[number] / 4)
    return torch.sin(a * branch) + b * branch


def _chunks(w: Weights, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    first, second = (a * w.vectors[number]).chunk(2, dim=1)
    return torch.cat([second, first if number else torch.cos(second)], dim=1)


def _hooked(w: Weights, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    made = functional.linear(a, w.matrices[number], w.vectors[0])
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient * 0.5)
    return torch.sin(made)


def _averaged(w: Weights, a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    w.mean.mul_(0.9).add_(a.detach().mean(0))
    return a + w.mean.clone()


STEPS: dict[str, Callable[[Weights, torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "linear": lambda w, a, b, n: torch.tanh(functional.linear(a, w.matrices[n], w.vectors[n])),
    "linear whose bias is another's": lambda w, a, b, n: functional.linear(a, w.matrices[n], w.vectors[1 - n]),
    "product": lambda w, a, b, n: torch.sin(a @ w.matrices[n]),
    "twice": lambda w, a, b, n: torch.sin(torch.sin(a @ w.matrices[n]) @ w.matrices[n]) * w.vectors[n],
    "norm": lambda w, a, b, n: functional.layer_norm(a, (WIDTH,), w.vectors[n], w.vectors[0]),
    "sum": lambda w, a, b, n: a + b,
    "join": lambda w, a, b, n: torch.cat([a, b], dim=1) @ torch.cat([w.matrices[n], w.matrices[0]]) / 4,
    "view": lambda w, a, b, n: a.t().contiguous().t()[:, [3, 0, 1, 2]],
    "same memory": lambda w, a, b, n: a.reshape(SAMPLES, WIDTH) + w.flat.view(SAMPLES, WIDTH),
    "constant": lambda w, a, b, n: torch.ones_like(a) * w.vectors[n] + torch.sin(w.flat[0]),
    "in place": _in_place,
    "shared branch": _shared_branch,
    "chunks": _chunks,
    "hooked": _hooked,
    "averaged": _averaged,
    "function": lambda w, a, b, n: Scaled.apply(torch.tanh(a), w.vectors[n], w.runs),
    "checkpoint": lambda w, a, b, n: checkpoint(w.block, a, n, use_reentrant=False),
    "reentrant checkpoint": lambda w, a, b, n: checkpoint(w.block, a, n, use_reentrant=True),
    "frozen": lambda w, a, b, n: a * w.vectors[n].detach() + torch.cos(b),
    "detached": lambda w, a, b, n: a.detach() * w.vectors[n] + b,
    "masked": lambda w, a, b, n: a * (b > 0).long() + w.vectors[n],
}


@dataclass(frozen=True)
class Step:
    """One step of a stage."""

    kind: str
    operands: tuple[int, int]
    """Places of values in the list of all that the stage has so far."""
    number: int
    """Of the weights that it uses."""


class RandomStage(nn.Module):
    """Takes and makes values by name, and does its steps between."""

    def __init__(self, chance: random.Random, takes: list[str], makes: list[str], kinds: list[str]) -> None:
        super().__init__()
        self.weights = Weights(chance)
        self.takes = takes
        self.uses_all = chance.random() < 0.7
        num = len(takes)
        self.steps = [
            Step(
                chance.choice(kinds),
                (num + at - 1 if chance.random() < 0.6 else chance.randrange(num + at), chance.randrange(num + at)),
                chance.randrange(2),
            )
            for at in range(NUM_STEPS)
        ]
        last = num + NUM_STEPS - 1
        # The first value that is made is the last that is computed; others may be any, an input too.
        self.made = {
            name: chance.choice([last, chance.randrange(last + 1)]) if at else last for at, name in enumerate(makes)
        }

    def forward(self, **values: torch.Tensor) -> dict[str, torch.Tensor]:
        known = [values[name] for name in self.takes]
        for step in self.steps:
            a, b = (known[at] for at in step.operands)
            if a.ndim == 1:  # a buffer that came
                a = a.expand(SAMPLES, WIDTH)
            if b.ndim == 1:
                b = b.expand(SAMPLES, WIDTH)
            known.append(STEPS[step.kind](self.weights, a, b, step.number))
        if self.uses_all:
            known[-1] = known[-1] + sum(torch.sin(values[name]) for name in self.takes)
        made = {name: known[at] for name, at in self.made.items()}
        return {name: self.weights.mean if name.startswith("mean") else value for name, value in made.items()}


@dataclass(frozen=True)
class RandomModel:
    """Stages and the graph between them."""

    graph: StageGraph
    stages: list[RandomStage]


def draw_model(seed: int, num_stages: int) -> RandomModel:
    """The model of a seed: the same one at every call, with weights of its own."""
    chance = random.Random(seed)
    edges = [Edge(at, at + 1, f"hidden{at}") for at in range(num_stages - 1)]
    for source in range(num_stages):
        for target in range(source + 1, num_stages):
            if chance.random() < 0.5:
                # A value may go to several stages, under one name.
                edges.append(Edge(source, target, chance.choice([f"skip{source}", f"mean{source}"])))
    graph = StageGraph(num_stages, tuple(edges))
    kinds = chance.sample(sorted(STEPS), 6)
    stages = []
    for at in range(num_stages):
        takes = [edge.name for edge in graph.edges_into(at)] or ["x"]
        makes = list(dict.fromkeys(edge.name for edge in graph.edges_out_of(at))) or ["y"]
        stages.append(RandomStage(chance, takes, makes, kinds))
    return RandomModel(graph, stages)


def batches_of(seed: int, num_microbatches: int) -> list[torch.Tensor]:
    """What the first stage gets."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(num_microbatches)]


def loss_of(made: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One number from what the last stage makes."""
    return (made["y"] ** 2).mean()


def train_alone(model: RandomModel, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The oracle: the losses; gradients are added micro-batch after micro-batch."""
    losses = []
    for batch in batches:
        values: Values = {"x": batch.clone()}
        for stage in model.stages:
            made = stage(**{name: values[name] for name in stage.takes})
            # What goes from stage to stage has a gradient, also where nobody before needs one.
            values |= {name: one if one.requires_grad else one.clone().requires_grad_() for name, one in made.items()}
        loss = loss_of(values) / len(batches)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach() * len(batches))
    return losses


def train_by(schedule: Schedule, model: RandomModel, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """All stages at work in this process, in an order in which their ranks may come on; the losses."""
    graph = model.graph
    last = graph.num_stages - 1
    work = [
        StageWork(
            Stage(at, module, loss=loss_of if at == last else None),
            tuple(dict.fromkeys(edge.name for edge in graph.edges_out_of(at))),
            len(batches),
        )
        for at, module in enumerate(model.stages)
    ]
    sent: dict[tuple[int, int, int], Values] = {}
    returned: dict[tuple[int, int, int], Values] = {}
    for action in order_of_progress(schedule, graph):
        at, number = action.stage, action.microbatch
        later = sorted({edge.target for edge in graph.edges_out_of(at)}, reverse=True)
        if action.kind is ActionKind.F:
            taken = {edge.name: sent[edge.source, at, number][edge.name].clone() for edge in graph.edges_into(at)}
            made = work[at].run_forward(number, taken, {} if at else {"x": batches[number].clone()}, None)
            made = {name: leaving_copy(value) for name, value in made.items()}
            for target in later:
                sent[at, target, number] = made
        elif action.kind is ActionKind.W:
            work[at].run_weight_backward(number)
        else:
            gradients = add_gradients(returned[at, target, number] for target in later)
            run = work[at].run_backward if action.kind is ActionKind.B else work[at].run_input_backward
            found = run(number, gradients)
            for source in {edge.source for edge in graph.edges_into(at)}:
                names = {edge.name for edge in graph.edges_into(at) if edge.source == source}
                returned[source, at, number] = {name: value for name, value in found.items() if name in names}
    return [work[last].losses[number] for number in range(len(batches))]
