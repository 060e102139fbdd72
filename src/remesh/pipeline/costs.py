"""Costs of a pipeline step: compute and transfer times, and bytes, for simulation and search.

A stage costs compute times and bytes; an edge costs transfer times. What a transfer occupies is a *line*: one for each
pair of ranks and direction, or the NIC of the sending rank outwards and that of the taking rank inwards, which all of
their edges share. Any unit of time will do, as long as it is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.pipeline_error import PipelineError

_STAGE_KEYS = ("forward_s", "input_grad_s", "weight_grad_s", "stash_bytes", "delayed_bytes", "backward_s")


class Lines(StrEnum):
    """The link that a transfer occupies."""

    HOP = "hop"
    """A line of its own for each pair of ranks and direction."""
    NIC = "nic"
    """One line out of each rank and one into it, for all of its edges and both passes."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """The times and bytes of one micro-batch on a stage."""

    forward_s: float
    """Time of F. Invariant of all times: >= 0, finite."""
    input_grad_s: float
    """Time of I."""
    weight_grad_s: float
    """Time of W."""
    stash_bytes: int = 0
    """What is kept from F to I, or to B. Invariant of all bytes: >= 0."""
    delayed_bytes: int | None = None
    """What is kept from I to W; as much as the stash by default."""
    backward_s: float | None = None
    """Time of B; as long as I and W together by default."""

    def __post_init__(self) -> None:
        times = (self.forward_s, self.input_grad_s, self.weight_grad_s, self.backward_s or 0.0)
        if not all(0 <= time < math.inf for time in times) or self.stash_bytes < 0 or (self.delayed_bytes or 0) < 0:
            raise PipelineError(f"describing what a stage costs: expected finite numbers >= 0, found {self}")

    @property
    def whole_backward_s(self) -> float:
        """Time of B."""
        return self.input_grad_s + self.weight_grad_s if self.backward_s is None else self.backward_s

    @property
    def kept_bytes(self) -> int:
        """The bytes kept from I to W."""
        return self.stash_bytes if self.delayed_bytes is None else self.delayed_bytes


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """The transfer time of a micro-batch's value over an idle edge."""

    forward_s: float
    """Of the value. Invariant of both: >= 0, finite."""
    backward_s: float
    """Of its gradient."""

    def __post_init__(self) -> None:
        if not all(0 <= time < math.inf for time in (self.forward_s, self.backward_s)):
            raise PipelineError(f"describing what an edge costs: expected finite times >= 0, found {self}")


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of every stage and every edge of a graph.

    >>> Costs.uniform(StageGraph.chain(2), transfer_s=0.5).edges
    (EdgeCost(forward_s=0.5, backward_s=0.5),)
    """

    stages: tuple[StageCost, ...]
    """One for each stage."""
    edges: tuple[EdgeCost, ...]
    """One for each edge of the graph, in its order."""
    lines: Lines = Lines.HOP

    @classmethod
    def uniform(
        cls,
        graph: StageGraph,
        *,
        stage: StageCost | None = None,
        transfer_s: float = 0.0,
        lines: Lines = Lines.HOP,
    ) -> Costs:
        """Equal stages (each of F, I and W takes 1 and a stash is 1 byte, unless ``stage`` is given), equal edges."""
        stage = stage or StageCost(1.0, 1.0, 1.0, stash_bytes=1)
        return cls((stage,) * graph.num_stages, (EdgeCost(transfer_s, transfer_s),) * len(graph.edges), lines)

    def without_transfers(self) -> Costs:
        """The same compute with transfers that take no time: what the signal bound is computed with."""
        return replace(self, edges=(EdgeCost(0.0, 0.0),) * len(self.edges))

    def check_fits(self, graph: StageGraph) -> None:
        """`PipelineError` unless there is one cost for each stage and each edge of the graph."""
        if (len(self.stages), len(self.edges)) != (graph.num_stages, len(graph.edges)):
            raise PipelineError(
                f"joining costs and a stage graph: expected costs of {graph.num_stages} stages and {len(graph.edges)} "
                f"edges, found {len(self.stages)} and {len(self.edges)}; make both for the same model"
            )


def read_costs(form: Mapping[str, Any]) -> tuple[StageGraph, Costs]:
    """A stage graph and its costs from their JSON form; `PipelineError` names what is wrong with it.

    ``stages`` lists the fields of `StageCost`. ``edges`` lists ``source``, ``target``, ``name`` and either
    ``forward_s`` and ``backward_s``, or ``nbytes``, which ``rate_bytes_per_s`` (and ``latency_s``) turn into both
    times. Without ``edges`` the stages are a chain, with ``transfer_s`` on every edge. ``lines``: ``"hop"``, ``"nic"``.
    """
    try:
        stages = tuple(_read_stage(number, stage) for number, stage in enumerate(form["stages"]))
        lines = Lines(form.get("lines", Lines.HOP))
        if "edges" not in form:
            graph = StageGraph.chain(len(stages))
            transfer_s = float(form.get("transfer_s", 0.0))
            return graph, Costs(stages, (EdgeCost(transfer_s, transfer_s),) * len(graph.edges), lines)
        edges = tuple(Edge(int(e["source"]), int(e["target"]), str(e.get("name", "hidden"))) for e in form["edges"])
        of_edges = tuple(_read_edge(edge, form) for edge in form["edges"])
        return StageGraph(len(stages), edges), Costs(stages, of_edges, lines)
    except PipelineError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise PipelineError(
            f"reading the costs of a pipeline: {type(error).__name__}: {error}; expected stages with forward_s, "
            "input_grad_s, weight_grad_s, and edges with source, target and times or nbytes"
        ) from error


def _read_stage(number: int, stage: Mapping[str, Any]) -> StageCost:
    if absent := [key for key in ("forward_s", "input_grad_s", "weight_grad_s") if key not in stage]:
        raise PipelineError(
            f"reading the costs of a pipeline: stage {number} has no {' and no '.join(absent)}, expected the seconds "
            "of its forward and of both halves of its backward; add them"
        )
    return StageCost(**{key: stage[key] for key in _STAGE_KEYS if key in stage})


def _read_edge(edge: Mapping[str, Any], form: Mapping[str, Any]) -> EdgeCost:
    if "nbytes" in edge:
        time_s = float(form.get("latency_s", 0.0)) + edge["nbytes"] / form["rate_bytes_per_s"]
        return EdgeCost(time_s, time_s)
    return EdgeCost(float(edge["forward_s"]), float(edge["backward_s"]))
