"""Survey of a pipeline before a step: the stage of each rank, and the layout of every value.

In steps, all of them gathers over the whole group, so that whatever is wrong is raised on all ranks alike:

1. Every rank reports its stage, the stage's mesh, its host, and which graph, schedule and options it was given
   (`survey_places`).
2. Stage by stage, in the order of the graph: its ranks call their module once, without gradients, on zeros in the
   shapes that the stages before reported, and report what came out. Random numbers and buffers are put back after
   (`survey_values`).
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from remesh.comm.gather import Group, gather_from, group_rank
from remesh.layout import Layout, Mesh, layout_from_spec, parse_spec
from remesh.layout.from_torch import dtype_name, torch_dtype
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.edges import local_shape
from remesh.pipeline.running.stage import Stage, Values, call_module, spec_of

DOING = "starting a pipeline"


@dataclass(frozen=True)
class Places:
    """The meshes of all stages, and the hosts of all ranks."""

    meshes: tuple[Mesh, ...]
    """Of every stage; ranks are those of the group."""
    host_of: Mapping[int, str]
    """Host of every rank of the group."""


@dataclass(frozen=True)
class StageValues:
    """How the values of one stage lie on its mesh, by name."""

    takes: Mapping[str, Layout]
    makes: Mapping[str, Layout]


def names_made(graph: StageGraph, stage: int) -> tuple[str, ...]:
    """Names of the values that a stage makes, each once; empty for the last stage."""
    return tuple(dict.fromkeys(edge.name for edge in graph.edges_out_of(stage)))


def survey_places(stage: Stage, graph: StageGraph, describe: Callable[[], str], group: Group) -> Places:
    """Gather the meshes of all stages. Called by every rank of the group; blocks until all have called it.

    ``describe`` returns what all ranks must have been given alike, or raises what is wrong with it. `PipelineError` on
    all ranks when they differ.
    """

    def tell() -> list[Any]:
        mesh = stage.mesh
        if mesh is None:
            where: list[Any] = [[1], [group_rank(group)]]
        else:
            ranks = [int(rank) for rank in mesh.mesh.reshape(-1)]
            where = [list(mesh.shape), [dist.get_group_rank(group, rank) if group else rank for rank in ranks]]
        return [stage.index, where, socket.gethostname(), describe()]

    told = gather_from(tell, group, DOING)
    meshes = _meshes_of([(index, where) for index, where, _, _ in told], graph.num_stages)
    texts = [text for _, _, _, text in told]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise PipelineError(
            f"{DOING}: expected one graph, schedule and options on all {len(told)} ranks, found {texts[0]} on rank 0 "
            f"and {texts[other]} on rank {other}; build them identically on every rank"
        )
    return Places(meshes, {rank: host for rank, (_, _, host, _) in enumerate(told)})


def _meshes_of(told: list[tuple[int, list[list[int]]]], num_stages: int) -> tuple[Mesh, ...]:
    """The mesh of every stage, from what each rank sends of its own."""
    members: dict[int, list[int]] = {}
    for rank, (index, where) in enumerate(told):
        if index >= num_stages:
            raise PipelineError(
                f"{DOING}: rank {rank} works for stage {index}, the graph has stages 0 to {num_stages - 1}; place "
                "every rank on one of these"
            )
        first = members.setdefault(index, [rank])[0]
        if rank != first:
            members[index].append(rank)
        if where != told[first][1]:
            raise PipelineError(
                f"{DOING}: stage {index} is on mesh {told[first][1]} (shape, ranks) on rank {first}, but on "
                f"{where} on rank {rank}; give all ranks of a stage one mesh"
            )
    meshes = []
    for index in range(num_stages):
        if index not in members:
            raise PipelineError(f"{DOING}: stage {index} of {num_stages} has no rank; place one there")
        shape, ranks = told[members[index][0]][1]
        if sorted(ranks) != members[index]:
            raise PipelineError(
                f"{DOING}: the mesh of stage {index} has ranks {sorted(ranks)}, but ranks {members[index]} were "
                "given this stage; expected the same ranks"
            )
        meshes.append(Mesh.of({f"axis{axis}": size for axis, size in enumerate(shape)}, ranks))
    return tuple(meshes)


def survey_values(
    stage: Stage, graph: StageGraph, places: Places, example: tuple[Values, Any], group: Group
) -> tuple[StageValues, ...]:
    """How the values of every stage lie, by stage. Called by every rank of the group.

    ``example`` is the first micro-batch: entries of the batch, and target. `PipelineError` on all ranks for a value
    that is not made, has a name twice among those that a stage takes, or cannot be cut by its sharding spec.
    """
    device = device_of(stage.module)
    layouts: list[dict[str, Layout]] = []
    found = []
    for index, mesh in enumerate(places.meshes):
        coming = _coming(graph, index, layouts)

        def tell(index: int = index, coming: Mapping[str, Layout] = coming, mesh: Mesh = mesh) -> Any:
            if stage.index != index:
                return None
            takes = {name: spec_of(stage.takes.get(name), layout.ndim) for name, layout in coming.items()}
            taken = _lay(takes, coming, mesh)
            rank = group_rank(group)
            values = {
                name: torch.zeros(local_shape(layout, rank), dtype=torch_dtype(layout.dtype), device=device)
                for name, layout in taken.items()
            }
            with unchanged(stage.module):
                made = call_module(stage, names_made(graph, index), {**values, **example[0]}, example[1])
            return [takes, {name: _describe(stage, name, made[name], mesh) for name in names_made(graph, index)}]

        told = [gathered for gathered in gather_from(tell, group, DOING) if gathered is not None]
        if any(each != told[0] for each in told):
            raise PipelineError(
                f"{DOING}: the ranks of stage {index} have values of different shapes, found {told}; cut values evenly"
            )
        takes, makes = told[0]
        layouts.append({n: layout_from_spec(spec, shape, mesh, dtype) for n, (spec, shape, dtype) in makes.items()})
        found.append(StageValues(_lay(takes, coming, mesh), layouts[-1]))
    return tuple(found)


def device_of(module: nn.Module) -> torch.device:
    """The device of a module; the CPU for a module without tensors."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _coming(graph: StageGraph, stage: int, layouts: list[dict[str, Layout]]) -> dict[str, Layout]:
    """What a stage takes, by name, as it lies where it was made."""
    coming: dict[str, Layout] = {}
    for edge in graph.edges_into(stage):
        if edge.name in coming:
            raise PipelineError(
                f"{DOING}: stage {stage} takes two values named {edge.name!r}, expected names of their own, because "
                "its module gets them by name; rename one"
            )
        coming[edge.name] = layouts[edge.source][edge.name]
    return coming


def _lay(specs: Mapping[str, str], coming: Mapping[str, Layout], mesh: Mesh) -> dict[str, Layout]:
    return {
        name: layout_from_spec(spec, coming[name].global_shape, mesh, coming[name].dtype)
        for name, spec in specs.items()
    }


def _describe(stage: Stage, name: str, value: torch.Tensor, mesh: Mesh) -> list[Any]:
    """Spec, global shape and dtype of a value of which this rank has made its part."""
    spec = spec_of(stage.makes.get(name), value.ndim)
    dims = parse_spec(spec).dims
    if len(dims) != value.ndim or any(axis >= mesh.ndim for axes in dims for axis in axes):
        raise PipelineError(
            f"{DOING}: stage {stage.index} makes {name!r} with {value.ndim} dims on a mesh of {mesh.ndim} axes, which "
            f"{spec} does not fit; correct the spec"
        )
    parts = [math.prod(mesh.shape[axis] for axis in axes) for axes in dims]
    return [spec, [size * num for size, num in zip(value.shape, parts, strict=True)], dtype_name(value.dtype)]


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Within it a module may be called, and nothing is different after."""
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    device = device_of(module)
    # Of other devices nothing is touched: by default torch would look at all of the machine, and warn of it.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        yield
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])
