"""Tied weights: the gradient of a weight that several stages have, summed over them.

A language model uses one table for its first layer and its last. Each stage that uses such a weight has a parameter of
its own for it, on its own mesh and cut in its own way. What a step adds to the gradients of these are addends of a
partial sum, one for each row of the schedule, whose ranks add up those of their own stages before. One reshard at the
end of the step gives every stage the whole, cut as its parameter is.

What was in ``.grad`` before the step is set aside meanwhile: it is a whole already.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from remesh.comm.gather import Group
from remesh.layout.from_torch import Piece, piece_of
from remesh.pipeline.graph import StageGraph, Tie
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.stage import Stage
from remesh.resharding.planning.transfer import PlanOptions
from remesh.resharding.reshard_api import reshard

SetAside = Sequence[Mapping[nn.Parameter, torch.Tensor | None]]
"""For each tied weight this rank's parameters, and their gradients from before a step."""


@dataclass(frozen=True)
class TiedWeights:
    """The tied weights of a pipeline, on one rank."""

    graph: StageGraph
    stages: Mapping[int, Stage]
    """Those of this rank, by number."""
    row_of: Mapping[int, int]
    """The row of every stage in the schedule."""
    group: Group
    options: PlanOptions

    def parameters_of(self, tie: Tie) -> list[nn.Parameter]:
        """Those of this rank's stages, each once; `PipelineError` when a stage has none of that name."""
        found: dict[nn.Parameter, None] = {}
        for index, name in tie.parameters:
            if index not in self.stages:
                continue
            module = self.stages[index].module
            for each in module.modules():
                if isinstance(each, FSDPModule):  # after a forward it may have whole parameters: no gradient is theirs
                    each.reshard()
            own = dict(module.named_parameters(remove_duplicate=False))
            if name not in own:
                raise PipelineError(
                    f"looking for the tied weight {tie}: stage {index} has no parameter {name!r}, found "
                    f"{', '.join(own)}; name it as the module of the stage does"
                )
            if own[name].requires_grad:
                found[own[name]] = None
        parts = {(tuple(piece_of(one).shards), getattr(one, "placements", None)) for one in found}
        if len(parts) > 1:
            raise PipelineError(
                f"looking for the tied weight {tie}: stages of one rank have it with placements "
                f"{[placements for _, placements in parts]}, expected one layout; shard it alike on these stages"
            )
        return list(found)

    def set_aside(self) -> SetAside:
        """Take away the gradients of tied weights, before a step."""
        before = [{parameter: parameter.grad for parameter in self.parameters_of(tie)} for tie in self.graph.ties]
        for parameter in itertools.chain(*before):
            parameter.grad = None
        return before

    @torch.no_grad()
    def add_up(self, before: SetAside) -> None:
        """Sum what the step has added, over all stages, and add what was set aside. Called by every rank."""
        give: dict[str, Piece] = {}
        sums: dict[str, torch.Tensor] = {}
        is_spread = False
        for tie, mine in zip(self.graph.ties, before, strict=True):
            rows = sorted({self.row_of[index] for index, _ in tie.parameters})
            is_spread |= len(rows) > 1
            if not mine:
                continue
            name, total = str(tie), functools.reduce(torch.add, map(_gradient_of, mine))
            sums[name] = total
            if len(rows) > 1:
                piece = piece_of(total)
                addend = rows.index(next(self.row_of[index] for index, _ in tie.parameters if index in self.stages))
                shards = tuple(replace(shard, addend=addend) for shard in piece.shards)
                give[name] = replace(piece, shards=shards, partial="sum")
                sums[name] = torch.empty_like(total)
        if is_spread:
            reshard(give, {name: sums[name] for name in give}, group=self.group, **self.options)
        for tie, mine in zip(self.graph.ties, before, strict=True):
            for parameter, old in mine.items():
                found = sums[str(tie)]
                parameter.grad = found.clone() if old is None else old + found


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """What the step has added, cut as the parameter is."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient
