"""Random stages on random meshes, with what programs do around a value, and one process that trains the same modules.

A seed draws the width of each stage (data-parallel ranks, tensor parallelism, FSDP2, the two together, FSDP2 with
replicas), the values between stages, the weights that stages have together, the habits of each module, and the
schedule. What one process does with whole modules and whole micro-batches is the oracle.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from remesh.pipeline import Edge, Pipeline, Schedule, Stage, StageGraph, Tie, Transfers
from remesh.pipeline.csv_text import read_csv
from remesh.pipeline.schedules import SCHEDULES

torch_visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

SEVERAL_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
WIDTH, ROWS, NUM_MICROBATCHES, NUM_STEPS = 4, 12, 4, 2
MAX_RANKS = 7
Values = dict[str, Any]

ANY_WIDTH = ("random", "generator", "counter", "cache", "checkpoint", "hook", "sometimes", "memory", "held", "autocast")
"""What a module does beside its layers, on any number of ranks."""
ONE_RANK = ("first", "statistics", "running mean")
"""What depends on all rows of a micro-batch."""
TIED = ("core.up.weight", "lone")
"""Parameters that stages may have together."""
FSDP_AT = ("whole", "core", "both")
"""The module that FSDP wraps: the stage's, its layers alone, so that the other parameters are not its, or both."""
KINDS = ("plain", "plain", "tp", "fsdp", "hsdp", "tp fsdp")
LEAVES = ("local", "replicated", "partial", "rows", "columns")
"""How what a tensor-parallel stage makes leaves it: as local tensors, or as DTensors of these placements."""


@dataclass(frozen=True)
class Drawn:
    """One stage as it was drawn."""

    kind: str
    dp: int
    """Number of data-parallel ranks."""
    replicas: int
    """How many of these have the same shard of FSDP; 1 where they are not an axis of their own."""
    tp: int
    habits: tuple[str, ...]
    leaves: str
    fsdp_at: str
    seed: int

    @property
    def size(self) -> int:
        """Number of its ranks."""
        return self.dp * self.tp

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Data axes, and the one of tensor parallelism."""
        return (self.replicas, self.dp // self.replicas, self.tp) if self.kind == "hsdp" else (self.dp, self.tp)


@dataclass(frozen=True)
class Case:
    """One pipeline as it was drawn."""

    stages: tuple[Drawn, ...]
    """Of one row of the schedule they are on the same ranks."""
    graph: StageGraph
    schedule: Schedule
    rows: int
    has_weights: bool
    """Whether the target is two tensors, the second of them weights of rows."""

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return sum(self.stages[row[0].stage].size for row in self.schedule.rows)


def draw_schedule(chance: random.Random) -> Schedule:
    """One of ours, with a stage on each rank, or one of torch's, with several."""
    if chance.random() < 0.6:
        return SCHEDULES[chance.choice(sorted(SCHEDULES))](chance.choice((2, 2, 3)), NUM_MICROBATCHES)
    return torch_schedule(chance.choice(SEVERAL_STAGES), NUM_MICROBATCHES)


def torch_schedule(name: str, num_microbatches: int) -> Schedule:
    """A schedule of torch on two ranks with two stages each."""
    rows = torch_visualizer.get_schedule_ops(name, 2, num_microbatches, 2)
    return read_csv("".join(",".join(map(str, filter(None, row))) + "\n" for row in rows), name=name)


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    schedule = draw_schedule(chance)
    num_stages, num_rows = schedule.num_stages, len(schedule.rows)
    left = MAX_RANKS
    of_rows: list[tuple[str, int, int, int, str]] = []
    for at in range(num_rows):
        kind = chance.choice(KINDS)
        tp = 2 if "tp" in kind and left - (num_rows - 1 - at) >= 2 else 1
        most = (left - (num_rows - 1 - at)) // tp
        dp = chance.choice([each for each in (1, 2, 3, 4) if each <= most])
        replicas = chance.choice([1, 2]) if kind == "hsdp" and dp % 2 == 0 else 1
        left -= dp * tp
        # What stages of one rank have together is cut alike.
        of_rows.append((kind, dp, replicas, tp, chance.choice(FSDP_AT)))
    stages: list[Drawn] = []
    for at in range(num_stages):
        kind, dp, replicas, tp, fsdp_at = of_rows[schedule.row_of[at]]
        habits = [*chance.sample(ANY_WIDTH, 3)]
        if dp == 1:
            habits.append(chance.choice(ONE_RANK))
        stages.append(
            Drawn(
                kind,
                dp,
                replicas,
                tp,
                tuple(habits),
                chance.choice(LEAVES),
                fsdp_at,
                chance.getrandbits(20),
            )
        )
    edges = [Edge(at, at + 1, "hidden") for at in range(num_stages - 1)]
    for source, target in itertools.combinations(range(num_stages), 2):
        edges += [Edge(source, target, f"{name}{source}") for name in ("bias", "sign", "skip") if chance.random() < 0.4]
        if "memory" in stages[source].habits:
            edges.append(Edge(source, target, f"memory{source}"))
    # Rows that do not divide evenly among the ranks of the last stage; what is made is cut evenly.
    uneven = all(stage.dp < 3 and stage.leaves != "rows" for stage in stages[:-1])
    rows = chance.choice((ROWS, 10)) if uneven else ROWS
    has_weights = chance.random() < 0.3
    ties = [
        Tie(tuple((at, name) for at in sorted(chance.sample(range(num_stages), chance.randint(2, num_stages)))))
        for name in TIED
        if chance.random() < 0.4
    ]
    return Case(tuple(stages), StageGraph(num_stages, tuple(edges), tuple(ties)), schedule, rows, has_weights)


class Core(nn.Module):
    """Two layers, between which tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class Habits(nn.Module):
    """A stage: its layers, and what it does around them."""

    def __init__(self, drawn: Drawn, at: int, graph: StageGraph) -> None:
        super().__init__()
        torch.manual_seed(drawn.seed)
        self.at, self.habits = at, drawn.habits
        self.takes = [edge.name for edge in graph.edges_into(at)] or ["hidden"]
        self.makes = list(dict.fromkeys(edge.name for edge in graph.edges_out_of(at)))
        self.core, self.lone = Core(), nn.Parameter(torch.randn(WIDTH) / 4)
        self.double()
        self.chance, self.generator = random.Random(drawn.seed), torch.Generator().manual_seed(drawn.seed)
        self.calls = 0
        self.memory: torch.Tensor | None = None
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, **values: torch.Tensor) -> Any:
        self.calls += 1
        hidden = values["hidden"] * self._scale(values["hidden"])
        for name in self.takes:
            if name.startswith("skip") and ("sometimes" not in self.habits or self.calls % 2):
                hidden = hidden + torch.sin(values[name])
            if name.startswith(("bias", "memory")):
                hidden = hidden * values[name]
            if name.startswith("sign"):
                hidden = hidden * (1 + values[name])
        if "checkpoint" in self.habits:
            made = checkpoint(self.core, hidden, use_reentrant=False)
        elif "autocast" in self.habits:
            with torch.autocast("cpu", dtype=torch.float16):  # of what is not float64
                made = self.core(hidden)
        else:
            made = self.core(hidden)
        if "hook" in self.habits and made.requires_grad:
            made.register_hook(lambda gradient: gradient * 0.5)
        if not self.makes:
            return made
        return {name: self._make(name, made, hidden) for name in self.makes}

    def _scale(self, hidden: torch.Tensor) -> torch.Tensor | float:
        scale: Any = 1.0
        if "random" in self.habits:
            scale = scale * (1 + self.chance.random())
        if "generator" in self.habits:
            scale = scale * (1 + torch.rand((), generator=self.generator, dtype=torch.float64))
        if "counter" in self.habits:
            scale = scale * self.calls
        if "cache" in self.habits:
            if not hasattr(self, "table") or len(self.table) < len(hidden):
                self.register_buffer("table", torch.full((len(hidden), 1), 1.0 + self.calls, dtype=torch.float64))
            scale = scale * self.table[: len(hidden)]
        if "first" in self.habits:
            if not hasattr(self, "shift"):
                self.register_buffer("shift", 1 + hidden.detach().abs().max())
            scale = scale * self.shift
        if "statistics" in self.habits:
            before = getattr(self, "seen", torch.ones((), dtype=torch.float64))
            self.seen = 0.5 * before + hidden.detach().abs().mean()
            scale = scale * self.seen
        if "running mean" in self.habits:
            self.mean.mul_(0.9).add_(hidden.detach().abs().mean())
            scale = scale * self.mean.clone()
        return scale

    def _make(self, name: str, made: Any, hidden: torch.Tensor) -> Any:
        if name == "hidden":
            return made
        if name.startswith("bias"):
            return torch.exp(self.lone)
        if name.startswith("sign"):
            return (hidden > 0).long()
        if name.startswith("memory"):
            if self.memory is None:
                self.memory = torch.zeros_like(hidden)
            with torch.no_grad():
                self.memory.mul_(0.5).add_(torch.cos(hidden))
            # In one process the next stage has used it when it is written again.
            return self.memory
        if "held" in self.habits:  # kept, and written again by the next call
            if getattr(self, "kept", None) is None or self.kept.shape != hidden.shape:
                self.kept = torch.zeros_like(hidden)
            self.kept = self.kept.detach()
            self.kept.copy_(torch.sin(hidden))
            return self.kept
        return torch.sin(hidden)


def loss_of(made: torch.Tensor, target: Any) -> torch.Tensor:
    """A mean over rows."""
    if isinstance(target, dict):
        return ((made - target["wanted"]) ** 2 * target["weights"]).mean()
    return ((made - target) ** 2).mean()


def target_of(case: Case, y: list[torch.Tensor]) -> Any:
    """What is given to the loss, from micro-batches of what is wanted."""
    return {"wanted": y, "weights": [1 + each[:, :1] for each in y]} if case.has_weights else y


def batch_of(case: Case, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The micro-batches of a step, and their targets."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, NUM_MICROBATCHES, case.rows, WIDTH)
    x, y = torch.randn(shape, generator=generator, dtype=torch.float64)
    return list(x), list(y)


def train_alone(case: Case) -> tuple[list[Habits], list[torch.Tensor], list[torch.Tensor]]:
    """The oracle: whole modules, micro-batch after micro-batch; the modules with their gradients, the losses, and what
    an evaluation returns after."""
    modules = [Habits(drawn, at, case.graph) for at, drawn in enumerate(case.stages)]
    for tie in case.graph.ties:
        (first, _), *others = tie.parameters
        for at, name in others:
            owner, _, last = name.rpartition(".")
            setattr(modules[at].get_submodule(owner), last, modules[first].get_parameter(name))
    losses, outputs = [], []
    for step in range(NUM_STEPS + 1):
        torch.set_grad_enabled(step < NUM_STEPS)
        wholes, wanted = batch_of(case, step)
        targets = target_of(case, wanted)
        for at_step, x in enumerate(wholes):
            y = {name: each[at_step] for name, each in targets.items()} if case.has_weights else targets[at_step]
            made: dict[int, Values] = {}
            for at, module in enumerate(modules):
                coming = case.graph.edges_into(at)
                taken = {edge.name: made[edge.source][edge.name] for edge in coming} if coming else {"hidden": x}
                # What goes from stage to stage has a gradient, also where nobody before needs one.
                out = module(**taken)
                made[at] = out if isinstance(out, dict) else {"": out}
            if step == NUM_STEPS:
                outputs.append(made[len(modules) - 1][""])
                continue
            losses.append(loss_of(made[len(modules) - 1][""], y))
            (losses[-1] / NUM_MICROBATCHES).backward()
    torch.set_grad_enabled(True)
    return modules, [loss.detach() for loss in losses], outputs


@dataclass(frozen=True)
class Here:
    """This rank's stages."""

    indices: list[int]
    mesh: DeviceMesh
    """Named after the seed: torch keeps what it knows of a mesh beyond its groups."""
    share: int
    """Its place among the data-parallel ranks."""


def place(case: Case, seed: int) -> Here:
    """All ranks make all meshes."""
    start, found = 0, None
    for row in case.schedule.rows:
        indices = sorted({action.stage for action in row})
        drawn = case.stages[indices[0]]
        ranks = torch.arange(start, start + drawn.size).reshape(drawn.mesh_shape)
        names = tuple(f"{axis}{seed}" for axis in ("replicas", "dp", "tp")[-ranks.ndim :])
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        if start <= dist.get_rank() < start + drawn.size:
            found = Here(indices, mesh, (dist.get_rank() - start) // drawn.tp)
        start += drawn.size
    assert found is not None
    return found


def shard_module(module: Habits, drawn: Drawn, mesh: DeviceMesh) -> None:
    """Give a whole module to the ranks of its stage."""
    assert mesh.mesh_dim_names is not None
    *data_axes, tp_axis = mesh.mesh_dim_names
    if drawn.tp > 1:
        layouts: dict[str, Placement] = {
            "local": Replicate(), "replicated": Replicate(), "partial": Partial(), "rows": Shard(0), "columns": Shard(1)
        }  # fmt: skip
        down = RowwiseParallel(output_layouts=layouts[drawn.leaves], use_local_output=drawn.leaves == "local")
        parallelize_module(module.core, mesh[tp_axis], {"up": ColwiseParallel(), "down": down})
    if "sdp" in drawn.kind:
        for wrapped in {"whole": [module], "core": [module.core], "both": [module.core, module]}[drawn.fsdp_at]:
            fully_shard(wrapped, mesh=mesh[tuple(data_axes)])


def cuts_of(names: list[str], leaves: str, num_data_axes: int) -> dict[str, Any]:
    """How values lie on a stage's mesh; what a DTensor says of itself besides."""
    on_tp: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1)}
    cuts: dict[str, Any] = {}
    for name in names:
        if name.startswith("bias"):
            cuts[name] = "R"
        elif name == "hidden" and leaves in on_tp:
            cuts[name] = [*[Shard(0)] * num_data_axes, on_tp[leaves]]
        else:
            cuts[name] = ("S0R", "S01R")[num_data_axes - 1]
    return cuts


def make_stage(case: Case, index: int, here: Here) -> tuple[Stage, Habits]:
    """A stage of this rank, and its module."""
    drawn = case.stages[index]
    module = Habits(drawn, index, case.graph)
    for tie in case.graph.ties:
        first, name = tie.parameters[0]
        if index in dict(tie.parameters):
            value = Habits(case.stages[first], first, case.graph).get_parameter(name)
            module.get_parameter(name).data.copy_(value.data)
    shard_module(module, drawn, here.mesh)
    assert here.mesh.mesh_dim_names is not None
    data_axes = here.mesh.mesh_dim_names[:-1]
    stage = Stage(
        index,
        module,
        here.mesh,
        takes=cuts_of(module.takes, "local", len(data_axes)),
        makes=cuts_of(module.makes, drawn.leaves if drawn.tp > 1 else "local", len(data_axes)),
        loss=dtensor_loss_of if index == len(case.stages) - 1 else None,
        data_axes=data_axes,
        entries=() if index else None,
    )
    return stage, module


def train_case(seed: int) -> None:
    """On every rank: train the case in a pipeline, and compare with the oracle."""
    case = draw_case(seed)
    torch.set_num_threads(1)
    here = place(case, seed)
    alone, losses, outputs = train_alone(case)
    stages = [make_stage(case, index, here) for index in here.indices]
    is_last, dp = here.indices[-1] == len(case.stages) - 1, case.stages[here.indices[0]].dp
    transfers = random.Random(seed).choice(list(Transfers)[:2])
    pipeline = Pipeline([stage for stage, _ in stages], case.graph, case.schedule, transfers=transfers)

    def share_of(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part.chunk(dp)[here.share] for part in parts]

    for step in range(NUM_STEPS):
        x, y = batch_of(case, step)
        batch = {"hidden": share_of(x)} if here.indices[0] == 0 else {}
        report = pipeline.step(batch, target_of(case, share_of(y)) if is_last else None)
        assert {span.action.stage for span in report.spans} == {*here.indices}
        if is_last and dp == 1:
            expected = losses[step * NUM_MICROBATCHES :][:NUM_MICROBATCHES]
            torch.testing.assert_close(list(report.losses), expected, rtol=1e-10, atol=1e-12)
    for index, (_, module) in zip(here.indices, stages, strict=True):
        named = zip(module.named_parameters(), alone[index].parameters(), strict=True)
        for (name, mine), other in named:
            expected = torch.zeros_like(other) if other.grad is None else other.grad
            found = torch.zeros_like(other) if mine.grad is None else whole_of(mine.grad)
            message = f"{name} of stage {index}: {{}}".format
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=message)
    x, _ = batch_of(case, NUM_STEPS)
    evaluated = pipeline.evaluate({"hidden": share_of(x)} if here.indices[0] == 0 else {})
    assert (len(evaluated.outputs) > 0) == is_last and not evaluated.losses
    for found, expected in zip(evaluated.outputs, share_of(outputs), strict=False):
        torch.testing.assert_close(whole_of(found), expected, rtol=1e-10, atol=1e-12)


def dtensor_loss_of(made: Any, target: Any) -> torch.Tensor:
    """The same of a DTensor, which is then one itself."""
    if isinstance(made, DTensor):

        def whole(one: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(one, made.device_mesh, [Replicate()])

        is_one = isinstance(target, torch.Tensor)
        target = whole(target) if is_one else {name: whole(one) for name, one in target.items()}
    return loss_of(made, target)


def whole_of(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as one process has it."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
