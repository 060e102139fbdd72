"""Stage graph of a pipeline: stages, and the values between them.

A *stage* is a part of the model on its own mesh. An *edge* is a named value that one stage makes and another takes: in
the forward pass it goes from source to target, and its gradient comes back the same way. An edge between stages that
are not neighbours (a long skip connection) is an edge like any other; two stages may have several.

Stages are numbered in an order in which values only go upwards. The last stage has the loss; a stage from which no way
leads there would never get a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from remesh.pipeline.pipeline_error import PipelineError


@dataclass(frozen=True, slots=True)
class Edge:
    """A value on its way from one stage to another."""

    source: int
    """The stage that makes it."""
    target: int
    """The stage that takes it, and gives its gradient back."""
    name: str
    """Name of the value. Invariant: unique among the edges from this source to this target."""

    def __str__(self) -> str:
        return f"{self.source}->{self.target} {self.name}"


@dataclass(frozen=True, slots=True)
class Tie:
    """A weight that several stages have, each as a parameter of its own; all get the sum of their gradients."""

    parameters: tuple[tuple[int, str], ...]
    """Stages, and the name that each has for it. Invariant: two stages or more, each once."""

    def __str__(self) -> str:
        return " = ".join(f"{name} of stage {stage}" for stage, name in self.parameters)


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The stages of a pipeline, and the values between them.

    >>> skip = StageGraph(3, (Edge(0, 1, "h"), Edge(1, 2, "h"), Edge(0, 2, "skip")))
    >>> [str(edge) for edge in skip.edges_into(2)]
    ['1->2 h', '0->2 skip']
    """

    num_stages: int
    """Invariant: >= 1."""
    edges: tuple[Edge, ...]
    """Invariant: ends are stages, ``source < target``, no two are equal, a way leads from every stage to the last."""
    ties: tuple[Tie, ...] = ()
    """Weights that several stages have. Invariant: of stages of the graph."""

    def __post_init__(self) -> None:
        self._check_ends()
        self._check_ties()
        self._check_order()
        self._check_ways_to_the_loss()

    @classmethod
    def chain(cls, num_stages: int, name: str = "hidden") -> StageGraph:
        """Each stage gives one value to the next."""
        return cls(num_stages, tuple(Edge(stage, stage + 1, name) for stage in range(num_stages - 1)))

    def edges_into(self, stage: int) -> tuple[Edge, ...]:
        """The values that a stage takes, in the order of ``edges``."""
        return tuple(edge for edge in self.edges if edge.target == stage)

    def edges_out_of(self, stage: int) -> tuple[Edge, ...]:
        """The values that a stage makes for others, in the order of ``edges``."""
        return tuple(edge for edge in self.edges if edge.source == stage)

    def names_made(self, stage: int) -> tuple[str, ...]:
        """Names of the values that a stage makes, each once; empty for the last stage."""
        return tuple(dict.fromkeys(edge.name for edge in self.edges_out_of(stage)))

    def _check_ends(self) -> None:
        if self.num_stages < 1:
            raise PipelineError(f"building a stage graph: expected at least 1 stage, found {self.num_stages}")
        for edge in self.edges:
            if not (0 <= edge.source < self.num_stages and 0 <= edge.target < self.num_stages):
                raise PipelineError(
                    f"building a stage graph: the edge {edge} must join two of the stages 0 to {self.num_stages - 1}; "
                    "correct the edge or the number of stages"
                )
        twice = [edge for edge, count in Counter(self.edges).items() if count > 1]
        if twice:
            raise PipelineError(
                f"building a stage graph: the edge {twice[0]} appears twice; give values their own names"
            )

    def _check_ties(self) -> None:
        for tie in self.ties:
            stages = {stage for stage, _ in tie.parameters}
            if len(stages) < 2 or len(stages) < len(tie.parameters) or not stages <= {*range(self.num_stages)}:
                raise PipelineError(
                    f"building a stage graph: the tied weight {tie} must be one of two or more of the stages 0 to "
                    f"{self.num_stages - 1}, with one name in each; correct its stages"
                )

    def _check_order(self) -> None:
        sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(self.num_stages), ()))
        for edge in self.edges:
            sorter.add(edge.target, edge.source)
        try:
            sorter.prepare()
        except CycleError as error:
            raise PipelineError(
                f"building a stage graph: stages wait for each other in a cycle, {_arrows(error.args[1])}; a value "
                "must not come back to a stage that it was made from: join these stages, or cut the model elsewhere"
            ) from None
        for edge in self.edges:
            if edge.source > edge.target:
                raise PipelineError(
                    f"building a stage graph: the edge {edge} goes to a stage with a smaller number; number the "
                    "stages so that each takes values only from stages with smaller numbers"
                )

    def _check_ways_to_the_loss(self) -> None:
        sources = {edge.source for edge in self.edges}
        # Edges go upwards, so a stage with an edge out of it leads to one with a larger number, and so to the last.
        dead = [stage for stage in range(self.num_stages - 1) if stage not in sources]
        if dead:
            raise PipelineError(
                f"building a stage graph: stage {dead[0]} gives no value to any other, so that no gradient would come "
                f"back to it; add its edges, or leave it out (the loss is on stage {self.num_stages - 1})"
            )


def _arrows(stages: Iterable[int]) -> str:
    return " -> ".join(map(str, stages))
