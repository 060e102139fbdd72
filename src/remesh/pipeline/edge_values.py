"""Values that an action needs and makes, from the stage graph.

A *value* crosses an edge in a pass, for one micro-batch: forwards as itself, backwards as its gradient. F needs the
values of the edges into its stage and makes those of the edges out of it; I and B need the gradients of the edges out
of their stage and make those of the edges into it; W needs and makes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.graph import StageGraph


class Pass(IntEnum):
    """The way a value goes over its edge."""

    FORWARD = 0
    """From source to target: the value."""
    BACKWARD = 1
    """From target to source: its gradient."""


def pass_of(kind: ActionKind) -> Pass | None:
    """The pass of the values that an action needs and makes; None for W."""
    if kind is ActionKind.F:
        return Pass.FORWARD
    return None if kind is ActionKind.W else Pass.BACKWARD


@dataclass(frozen=True, slots=True)
class Value:
    """A value that one action makes for another."""

    edge: int
    """Number of the edge in the graph."""
    way: Pass
    microbatch: int


def values_needed(graph: StageGraph, action: Action) -> tuple[Value, ...]:
    """The values that must have arrived before an action can start, in the order of the graph's edges."""
    return _values(graph, action, at_source=Pass.BACKWARD)


def values_made(graph: StageGraph, action: Action) -> tuple[Value, ...]:
    """The values that an action makes for other stages, in the order of the graph's edges.

    >>> from remesh.pipeline.graph import StageGraph
    >>> values_made(StageGraph.chain(3), Action.parse("1I4"))
    (Value(edge=0, way=<Pass.BACKWARD: 1>, microbatch=4),)
    """
    return _values(graph, action, at_source=Pass.FORWARD)


def _values(graph: StageGraph, action: Action, at_source: Pass) -> tuple[Value, ...]:
    """The values of an action at those ends of edges that the pass has on its stage."""
    way = pass_of(action.kind)
    if way is None:
        return ()
    return tuple(
        Value(number, way, action.microbatch)
        for number, edge in enumerate(graph.edges)
        if (edge.source if way is at_source else edge.target) == action.stage
    )
