"""Split backward pass: gradients of inputs first, of weights later.

No other module reads torch's autograd graph.

Definitions. The *whole* backward of a stage computes the gradients of its inputs and of its leaves (weights, and what
else was made to have a gradient). Split, its first part computes those of the inputs, for which stages before wait, and
leaves a `Rest`; the second part computes those of the weights, for which no stage waits. The *trunk* is all nodes of
the graph from which a way leads to an input. The *starts* of a node beside the trunk are the trunk's nodes, and the
outputs, from which ways lead to it that touch no further node of the trunk.

What can be put off: a leaf with a single start. Every way from an output to it goes through that start and then
leaves the trunk, so a backward from the start alone, with the gradient that the start has in the whole one, is the
leaf's gradient; it computes nothing of the trunk besides. All other leaves (a bias that is added twice) have theirs
computed in the first part, together with the inputs. So every leaf gets its gradient in one run of torch's engine, all
of it: nothing is lost, nothing is there twice, sums have the order of the whole backward, and so the same bits.

1. List the graph's nodes, each before those that it leads to; mark the trunk; give every node beside it its start.
2. First part: one run to the inputs and the leaves that cannot wait; hooks note the gradients that arrive at starts.
3. Second part: one run from each start to its leaves.

Some nodes must run once only: those of a `torch.autograd.Function`, whose backward is arbitrary code, and those whose
saved tensors come from a hook, which may compute a whole module anew (activation checkpointing). What they lead to
beside the trunk is not put off. A graph with reentrant checkpointing, which allows no backward to chosen tensors, or
with a compiled module, which allows no second one, is not split: its first part is the whole. Hooks that a module puts
on its own values may run in both parts; what they return counts once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from remesh.foundation.torch_private import is_saved_by_hooks

Gradients = list[torch.Tensor | None]
"""One for each input; None for an input that nothing depends on."""

_OUTPUTS = object()
"""Stands for the outputs as a start."""
_SEVERAL = object()
"""Stands for more than one start, or one that must not run again."""
_LEAF = "torch::autograd::AccumulateGrad"
_NEVER_SPLIT = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})


@dataclass(frozen=True, slots=True)
class Roots:
    """The outputs at which a backward begins."""

    outputs: Sequence[torch.Tensor]
    """Invariant: require grad."""
    gradients: Sequence[torch.Tensor]
    """One for each output."""


@dataclass(frozen=True, slots=True)
class _Start:
    """One run of the second part."""

    edges: Sequence[GradientEdge]
    gradients: Sequence[torch.Tensor]
    """One for each edge."""
    leaves: Sequence[torch.Tensor] | None
    """Whose gradients are computed; None for all that are reached."""
    arrived: tuple[torch.Tensor | None, ...] | None = None
    """At the node of the edges, after its hooks; None where nothing has run yet."""


@dataclass(slots=True)
class Rest:
    """The part of a backward that is still to be done, once."""

    starts: list[_Start]


class _Arrival(torch.autograd.Function):
    """Makes a tensor that came from elsewhere one that was computed from a leaf, in place.

    So a module may change what it gets, as it may in one process: leaves may not be changed.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The engine may make the same memory the gradient of a weight, to which others are added; this one is sent.
        return gradients[0].clone(), None


def begin_graph(values: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The leaves that get the gradients of values, and the values as computed from them; by name.

    Values without gradients, such as integers, have no leaf and stay what they are. The leaves hold no memory.
    """
    leaves, begun = {}, dict(values)
    for name, value in values.items():
        if value.is_floating_point() or value.is_complex():
            leaves[name] = value.new_zeros(()).expand(value.shape).requires_grad_()
            begun[name] = _Arrival.apply(leaves[name], value)  # type: ignore[no-untyped-call]
    return leaves, begun


def run_backward(roots: Roots, inputs: Sequence[torch.Tensor]) -> Gradients:
    """The whole backward; the gradients of the inputs, which are leaves."""
    if roots.outputs:
        torch.autograd.backward(list(roots.outputs), list(roots.gradients))
    return _collect(inputs)


def run_input_backward(roots: Roots, inputs: Sequence[torch.Tensor]) -> tuple[Gradients, Rest]:
    """The first part: the gradients of the inputs, which are leaves, and what is left to be done."""
    edges = [get_gradient_edge(value) for value in roots.outputs]
    whole = Rest([_Start(edges, roots.gradients, None)] if edges else [])
    nodes = _nodes_from(edge.node for edge in edges)
    trunk = _trunk_of(nodes, {get_gradient_edge(value).node for value in inputs})
    if not trunk:
        return [None] * len(inputs), whole
    if any(node.name() in _NEVER_SPLIT for node in nodes):
        return run_backward(roots, inputs), Rest([])
    leaves_of = _leaves_by_start(nodes, trunk, {edge.node for edge in edges})
    at_once = leaves_of.pop(_SEVERAL, [])
    from_outputs = leaves_of.pop(_OUTPUTS, [])
    arrived: dict[Node, tuple[torch.Tensor | None, ...]] = {}
    hooks = [node.register_prehook(functools.partial(arrived.__setitem__, node)) for node in leaves_of]
    try:
        torch.autograd.backward(
            list(roots.outputs),
            list(roots.gradients),
            inputs=[*inputs, *at_once],
            retain_graph=bool(leaves_of or from_outputs),
        )
    finally:
        for hook in hooks:
            hook.remove()
    starts = [_start_at(node, arrived[node], leaves) for node, leaves in leaves_of.items() if node in arrived]
    if from_outputs:
        beside = [number for number, edge in enumerate(edges) if edge.node not in trunk]
        gradients = [roots.gradients[number] for number in beside]
        starts.append(_Start([edges[number] for number in beside], gradients, from_outputs))
    return _collect(inputs), Rest(starts)


def run_weight_backward(rest: Rest) -> None:
    """The second part: add the gradients of the weights."""
    while rest.starts:
        start = rest.starts.pop()
        # The hooks of the start have run on what arrived. They run again, and what they make of it is thrown away.
        hook = None
        if start.arrived is not None:
            hook = start.edges[0].node.register_prehook(lambda _, arrived=start.arrived: arrived)
        try:
            torch.autograd.backward(start.edges, list(start.gradients), inputs=start.leaves)
        finally:
            if hook is not None:
                hook.remove()


def _collect(inputs: Sequence[torch.Tensor]) -> Gradients:
    found: Gradients = []
    for value in inputs:
        found.append(value.grad)
        value.grad = None
    return found


def _start_at(node: Node, arrived: tuple[torch.Tensor | None, ...], leaves: Sequence[torch.Tensor]) -> _Start:
    edges = [GradientEdge(node, number) for number, each in enumerate(arrived) if each is not None]
    return _Start(edges, [each for each in arrived if each is not None], leaves, arrived)


def _nodes_from(roots: Iterable[Node]) -> list[Node]:
    """All nodes of a graph, each before those that it leads to."""
    found: list[Node] = []
    seen: set[Node] = set()
    # A node is done when all that it leads to is: depth first, without recursion, for graphs are deep.
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return found[::-1]


def _trunk_of(nodes: Sequence[Node], inputs: set[Node]) -> set[Node]:
    trunk = inputs.intersection(nodes)
    for node in reversed(nodes):
        if any(child in trunk for child, _ in node.next_functions):
            trunk.add(node)
    return trunk


def _leaves_by_start(nodes: Sequence[Node], trunk: set[Node], roots: set[Node]) -> dict[Any, list[torch.Tensor]]:
    """The leaves beside the trunk, by their start: a node of the trunk, the outputs, or several."""
    start_of: dict[Node, Any] = {node: _OUTPUTS for node in roots if node not in trunk}
    leaves: dict[Any, list[torch.Tensor]] = {}
    for node in nodes:
        if node.name() == _LEAF and node not in trunk:
            leaves.setdefault(start_of[node], []).append(node.variable)  # type: ignore[attr-defined]
        beside = {child for child, _ in node.next_functions if child is not None and child not in trunk}
        if beside:
            start = _SEVERAL if _runs_once(node) else node if node in trunk else start_of[node]
            for child in beside:
                start_of[child] = start if start_of.get(child, start) is start else _SEVERAL
    return leaves


def _runs_once(node: Any) -> bool:
    """Whether a second run may do other things than the first."""
    return isinstance(node, BackwardCFunction) or is_saved_by_hooks(node)
