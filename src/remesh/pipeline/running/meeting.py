"""Meeting of a pipeline's ranks: the stage of each, its mesh, and what must be alike or cannot be.

Every rank reports its stage, the stage's mesh and data axes, how it takes values, its host, and which graph, schedule
and options it was given, in one gather over the whole group, so that whatever is wrong is raised on all ranks alike.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from remesh.comm.gather import Group, gather_from, group_rank
from remesh.foundation.torch_private import ranks_that_average
from remesh.layout import Mesh
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.stage import Stage
from remesh.pipeline.running.values import StageMesh, check_is_named, cut_form, spec_of

DOING = "starting a pipeline"


@dataclass(frozen=True)
class Places:
    """The meshes of all stages, and the hosts of all ranks."""

    meshes: tuple[StageMesh, ...]
    """Of every stage."""
    takes: tuple[Mapping[str, Any], ...]
    """How every stage takes values, by name, as `spec_of` reads it."""
    host_of: Mapping[int, str]
    """Host of every rank of the group."""

    def spec_taken(self, stage: int, name: str, ndim: int) -> str:
        """The spec with which a stage takes a value."""
        return spec_of(self.takes[stage].get(name, []), ndim)


def gather_places(stages: Sequence[Stage], graph: StageGraph, describe: Callable[[], str], group: Group) -> Places:
    """Gather the meshes of all stages. Called by every rank of the group; blocks until all have called it.

    ``describe`` returns what all ranks must have been given alike, or raises what is wrong with it. `PipelineError` on
    all ranks when they differ.
    """

    def tell() -> list[Any]:
        for stage in stages:
            _check_wrappers(stage)
            for edge in graph.edges_into(stage.index):
                check_is_named(stage, edge.name, stage.takes)
        return [[_where_is(stage, group) for stage in stages], socket.gethostname(), describe()]

    told = gather_from(tell, group, DOING)
    found = _read_stages([each[0] for each in told], graph.num_stages)
    texts = [text for *_, text in told]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise PipelineError(
            f"{DOING}: expected one graph, schedule and options on all {len(told)} ranks, found {texts[0]} on rank 0 "
            f"and {texts[other]} on rank {other}; build them identically on every rank"
        )
    meshes = tuple(
        StageMesh(Mesh.of({f"axis{at}": size for at, size in enumerate(shape)}, ranks), tuple(axes))
        for (shape, ranks, axes), _ in found
    )
    return Places(meshes, tuple(takes for _, takes in found), {rank: host for rank, (_, host, _) in enumerate(told)})


def _where_is(stage: Stage, group: Group) -> list[Any]:
    """What a rank sends of a stage of its own: its number, its mesh, how it takes values."""
    mesh = stage.mesh
    takes = {name: cut_form(cut) for name, cut in sorted(stage.takes.items())}
    if mesh is None:
        return [stage.index, [[1], [group_rank(group)], []], takes]
    ranks = [int(rank) for rank in mesh.mesh.reshape(-1)]
    names = mesh.mesh_dim_names or ()
    axes = [names.index(axis) for axis in stage.data_axes]
    return [stage.index, [[*mesh.shape], [dist.get_group_rank(group, r) if group else r for r in ranks], axes], takes]


def _read_stages(told: Sequence[Sequence[Any]], num_stages: int) -> list[tuple[Any, Any]]:
    """Mesh and values taken of every stage, from what each rank sends of its own."""
    found: dict[int, tuple[Any, Any]] = {}
    members: dict[int, list[int]] = {}
    for rank, index, where, takes in ((rank, *one) for rank, each in enumerate(told) for one in each):
        if index >= num_stages:
            raise PipelineError(
                f"{DOING}: rank {rank} works for stage {index}, the graph has stages 0 to {num_stages - 1}; place "
                "every rank on one of these"
            )
        members.setdefault(index, []).append(rank)
        first = members[index][0]
        first_where, first_takes = found.setdefault(index, (where, takes))
        if where != first_where:
            raise PipelineError(
                f"{DOING}: stage {index} is on mesh {first_where} (shape, ranks, data axes) on rank {first}, but on "
                f"{where} on rank {rank}; give all ranks of a stage one mesh"
            )
        if takes != first_takes:
            raise PipelineError(
                f"{DOING}: stage {index} takes values as {first_takes} on rank {first}, but as {takes} on rank {rank}; "
                "describe them alike on all ranks of a stage"
            )
    for index in range(num_stages):
        if index not in members:
            raise PipelineError(f"{DOING}: stage {index} of {num_stages} has no rank; place one there")
        ranks = found[index][0][1]
        if sorted(ranks) != members[index]:
            raise PipelineError(
                f"{DOING}: the mesh of stage {index} has ranks {sorted(ranks)}, but ranks {members[index]} were "
                "given this stage; expected the same ranks"
            )
    return [found[index] for index in range(num_stages)]


def _check_wrappers(stage: Stage) -> None:
    """Refuse what expects another order of calls, and a FSDP that averages over other ranks than the stage says."""
    for name, module in stage.module.named_modules():
        where = f"{DOING}: module {name or '(whole)'!r} of stage {stage.index} is"
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            raise PipelineError(
                f"{where} wrapped in {type(module).__name__}, which expects a backward after each forward, a pipeline "
                "has several forwards before; give the module itself and name the axes in data_axes, or use "
                "fully_shard"
            )
        num_ranks = ranks_that_average(module) if isinstance(module, FSDPModule) else None
        if num_ranks not in (None, stage.width):
            raise PipelineError(
                f"{where} sharded by FSDP, which averages gradients over {num_ranks} ranks, expected the "
                f"{stage.width} of the stage's data axes {stage.data_axes}; name the axes of its mesh in data_axes"
            )


def device_of(module: nn.Module) -> torch.device:
    """The device of a module; the CPU for a module without tensors."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
