"""Split of a `torch.nn` model into pipeline stages, at named modules.

1. The model's own ``forward`` is traced, symbolically and only as deep as the cuts lie: a module without a cut inside
   is one step, whatever it does. What ``forward`` does outside of these modules is a step if it works on values,
   weights or buffers. All else it does only once, when it is traced, and is refused where that shows: attributes that
   change, random numbers, constants that are written into.
2. Steps belong to the stage that has begun when they come; tensors are joined where the joined one is used, so that
   each travels from where it was made, unless a step between writes into one of them. A value that a later stage uses
   becomes an edge: from the stage that makes it straight to every stage that uses it, however far away. So long skip
   connections need no word.
3. Each stage is a module with its steps. It keeps the names of the model's parameters, so that a checkpoint, or a
   reshard to other cuts, finds them.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import fx, nn

from remesh.foundation.torch_private import never_compiled
from remesh.layout.from_torch import why_without_memory
from remesh.layout.torch_memory import find_shared
from remesh.pipeline.graph import Edge, StageGraph, Tie
from remesh.pipeline.pipeline_error import PipelineError

_DOING = "cutting a model into stages"
_CONSTANT = "_tensor_constant"
"""Begin of the names that torch gives to tensors that a forward makes of nothing."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
_IN_PLACE_OPERATORS = frozenset(getattr(operator, f"i{name}") for name in _OPERATORS)
_IN_PLACE = frozenset({"setitem", *(each.__name__ for each in _IN_PLACE_OPERATORS)})
"""Names of functions that write into their first argument, besides those that end in an underscore."""
_JOINS = frozenset({torch.cat, torch.concat, torch.stack})


@dataclass(frozen=True, eq=False)
class Parts:
    """A model in stages."""

    graph: StageGraph
    """Edges have the names of the steps that make their values."""
    modules: tuple[nn.Module, ...]
    """Of each stage; they share the model's parameters, under the same names. The last one returns what the model
    does."""
    entries: tuple[tuple[str, ...], ...]
    """Of each stage: arguments of the model's ``forward`` that it takes, from the batch."""


@never_compiled
def split_model(model: nn.Module, at: Sequence[str]) -> Parts:
    """The model in ``len(at) + 1`` stages; stage ``i + 1`` begins where the module named ``at[i]`` is called.

    Everything outside the modules, down to those in ``at``, must be traceable by `torch.fx`; `PipelineError` says where
    it is not, or does something that only a call can do. A parameter that several stages use is a tie of the graph.
    `PipelineError` also when a module of ``at`` is not called, or not in this order, a buffer is used in two stages, or
    one memory as two parameters; and when ``at`` is one text, whose letters would be names.

    >>> parts = split_model(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), ["2"])
    >>> [sorted(dict(module.named_parameters())) for module in parts.modules], parts.entries
    ([['0.bias', '0.weight'], ['2.bias', '2.weight']], (('input',), ()))
    """
    if isinstance(at, str):
        raise PipelineError(f"cutting a model into stages: found the text {at!r}, expected a list; write [{at!r}]")
    traced = _trace(model, at)
    stage_of = _assign(model, traced, at)
    ties = _find_ties(model, traced, stage_of)
    num_stages = len(at) + 1
    edges: dict[Edge, None] = {}
    for node in traced.nodes:
        for value in node.all_input_nodes:
            if value.op != "placeholder" and stage_of[value] < stage_of[node]:
                edges[Edge(stage_of[value], stage_of[node], value.name)] = None
    graph = StageGraph(num_stages, tuple(edges), ties)
    made = [_build_stage(model, traced, stage_of, graph, stage) for stage in range(num_stages)]
    return Parts(graph, tuple(module for module, _ in made), tuple(entries for _, entries in made))


class _Proxy(fx.Proxy):
    """A value that is traced; what a program does to it in place is a step that does so."""


for _name in _OPERATORS:
    _step = getattr(operator, f"i{_name}")
    setattr(
        _Proxy,
        f"__i{_name}__",
        lambda self, other, step=_step: self.tracer.create_proxy("call_function", step, (self, other), {}),
    )


class _Tracer(fx.Tracer):
    """Looks into modules only where they are cut."""

    proxy_buffer_attributes = True

    def __init__(self, at: Sequence[str]) -> None:
        super().__init__()
        self._at = tuple(at)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(name.startswith(f"{module_qualified_name}.") for name in self._at)


def _trace(model: nn.Module, at: Sequence[str]) -> fx.Graph:
    """The steps of the model; what tracing has changed of it is put back, and refused."""
    before = [(name, module, dict(vars(module)), dict(module._buffers)) for name, module in model.named_modules()]
    chance = torch.random.get_rng_state(), random.getstate()
    changed: list[str] = []
    try:
        traced = _Tracer(at).trace(model)
    except Exception as raised:
        raise PipelineError(
            f"{_DOING}: its forward cannot be traced down to the cuts ({type(raised).__name__}: {raised}); put what it "
            "does there into a module of its own, which is one step, or write the stages by hand"
        ) from raised
    finally:
        for name, module, attributes, buffers in before:
            changed += [f"{name}.{each}".lstrip(".") for each in _put_back(vars(module), attributes)]
            changed += [f"{name}.{each}".lstrip(".") for each in _put_back(module._buffers, buffers)]
    if not torch.equal(chance[0], torch.random.get_rng_state()) or chance[1] != random.getstate():
        changed.append("random numbers, which it draws")
    changed += [f"a constant, by {node.name}" for node in traced.nodes if _is_constant(_written_by(model, node))]
    if changed:
        raise PipelineError(
            f"{_DOING}: its forward changes {', '.join(changed)} outside of the modules that are one step, expected "
            "only buffers to be written there, in place: the rest would be done once, now, and never again; put it "
            "into a module of its own"
        )
    return traced


def _put_back(now: dict[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Names of what has changed, other than by a step that writes there at each call; constants stay."""
    changed = []
    for name in {**before, **now}:
        found = now.get(name)
        if (name in before and found is before[name]) or name.startswith(_CONSTANT):
            continue
        node = found.node if isinstance(found, fx.Proxy) else None
        while node is not None and node.op == "call_function" and node.target in _IN_PLACE_OPERATORS:
            node = node.all_input_nodes[0]
        if node is None or node.op != "get_attr" or str(node.target).rpartition(".")[2] != name:
            changed.append(name)
        now.pop(name)
        if name in before:
            now[name] = before[name]
    return changed


def _is_constant(node: fx.Node | None) -> bool:
    return node is not None and node.op == "get_attr" and str(node.target).startswith(_CONSTANT)


def _written_by(model: nn.Module, node: fx.Node) -> fx.Node | None:
    """The value into whose memory a step writes, by its name; of modules by their attribute ``inplace``."""
    if node.op == "call_module":
        writes = any(getattr(each, "inplace", False) for each in model.get_submodule(str(node.target)).modules())
    else:
        name = str(getattr(node.target, "__name__", node.target))
        is_in_place = name.endswith("_") and not name.endswith("__")
        writes = node.op in ("call_method", "call_function") and (
            is_in_place or name in _IN_PLACE or bool(node.kwargs.get("inplace"))
        )
    into = node.kwargs.get("out", node.args[0] if writes and node.args else None)
    return into if isinstance(into, fx.Node) else None


def _assign(model: nn.Module, traced: fx.Graph, at: Sequence[str]) -> dict[fx.Node, int]:
    """The stage of every step; the output belongs to the last."""
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for node in traced.nodes:
        if node.op == "call_module" and stage < len(at) and node.target == at[stage]:
            stage += 1
        stage_of[node] = len(at) if node.op == "output" else stage
    if stage < len(at):
        called = [str(node.target) for node in traced.nodes if node.op == "call_module"]
        raise PipelineError(
            f"{_DOING}: stage {stage + 1} is to begin at {at[stage]!r}, expected a module that is called after those "
            f"before it, found calls of {', '.join(called)}; name modules in the order of their calls"
        )
    written = [(step, into) for step in traced.nodes if (into := _written_by(model, step)) is not None]
    for node in reversed(traced.nodes):
        # A weight by itself belongs to those who use it.
        is_join = node.target in _JOINS and not any(
            node < step and _is_made_before(into, node) for step, into in written
        )
        if node.users and (node.op == "get_attr" or is_join):
            stage_of[node] = min(stage_of[user] for user in node.users)
    return stage_of


def _is_made_before(value: fx.Node, step: fx.Node) -> bool:
    """Whether the memory of a value may be that of one that was there before a step."""
    while value > step and value.op in ("call_method", "call_function") and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value < step


def _find_ties(model: nn.Module, traced: fx.Graph, stage_of: Mapping[fx.Node, int]) -> tuple[Tie, ...]:
    """Parameters that several stages use, under whatever names.

    No buffer is used in two stages under one name; it may have two, as tables that all layers look up have: then each
    stage has its own. No memory is that of two parameters that both see it.
    """
    first: dict[Any, tuple[int, str]] = {}
    names: dict[int, dict[int, str]] = {}
    """Of each parameter, by its identity: its first name in every stage."""
    parameters: dict[str, nn.Parameter] = {}
    for node in traced.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        users = [stage_of[user] for user in node.users] if node.op == "get_attr" else []
        for each in sorted({stage_of[node], *users}):
            for name, weight in _weights_of(model, str(node.target)):
                key = id(weight) if isinstance(weight, nn.Parameter) else name
                stage, known = first.setdefault(key, (each, name))
                if isinstance(weight, nn.Parameter):
                    parameters[known] = weight
                    names.setdefault(id(weight), {}).setdefault(each, name)
                elif stage != each:
                    raise PipelineError(
                        f"{_DOING}: {known!r} is used in stage {stage} and in stage {each}, expected one; buffers are "
                        "on the ranks of one stage only: split elsewhere, or give each stage its own copy"
                    )
    _check_memory(parameters, {name: stage for stage, name in first.values()})
    return tuple(Tie(tuple(sorted(of_stage.items()))) for of_stage in names.values() if len(of_stage) > 1)


def _check_memory(parameters: Mapping[str, nn.Parameter], stage_of: Mapping[str, int]) -> None:
    held = {name: one.detach() for name, one in parameters.items() if one.numel() and why_without_memory(one) is None}
    names = list(held)
    for group in find_shared(list(held.values())):
        for one, other in combinations([names[at] for at in group], 2):
            if stage_of[one] != stage_of[other] and find_shared([held[one], held[other]]):
                raise PipelineError(
                    f"{_DOING}: parameters {one!r} in stage {stage_of[one]} and {other!r} in stage {stage_of[other]} "
                    "lie in one memory, expected each in its own, since every stage would train its own copy; split "
                    "elsewhere, or clone one of them"
                )


def _weights_of(model: nn.Module, target: str) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers of what a step uses, with their names in the model."""
    *path, last = target.split(".")
    owner = getattr(model.get_submodule(".".join(path)), last)
    if isinstance(owner, nn.Module):
        for name, weight in (*owner.named_parameters(), *owner.named_buffers()):
            yield f"{target}.{name}", weight
    else:
        yield target, owner


def _build_stage(
    model: nn.Module, traced: fx.Graph, stage_of: dict[fx.Node, int], graph: StageGraph, stage: int
) -> tuple[nn.Module, tuple[str, ...]]:
    """The module of a stage, and the arguments of the model that it takes."""
    steps = [node for node in traced.nodes if stage_of[node] == stage and node.op not in ("placeholder", "output")]
    is_last = stage == graph.num_stages - 1
    (output,) = (node for node in traced.nodes if node.op == "output")
    used = {value for node in (*steps, *([output] if is_last else [])) for value in node.all_input_nodes}
    entries = [node for node in traced.nodes if node.op == "placeholder" and node in used]
    coming = {edge.name for edge in graph.edges_into(stage)}
    built = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    for node in traced.nodes:
        if node in entries:
            here[node] = built.node_copy(node)
    for node in traced.nodes:
        if node.name in coming and node not in entries:
            here[node] = built.placeholder(node.name)
    for node in steps:
        here[node] = built.node_copy(node, lambda value: here[value])
    if is_last:
        built.output(fx.node.map_arg(output.args[0], lambda value: here[value]))
    else:
        names = {edge.name for edge in graph.edges_out_of(stage)}
        made: dict[str, Any] = {node.name: here[node] for node in steps if node.name in names}
        built.output(made)
    module = fx.GraphModule(model, built, f"Stage{stage}")
    module.train(model.training)
    return module, tuple(str(node.target) for node in entries)
