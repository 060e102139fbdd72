"""Stages on meshes of several ranks, skip connections, and what happens when something is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from remesh.foundation.errors import ConfigError, Error, PeerError
from remesh.pipeline.graph import Edge, StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.edges import Payload
from remesh.pipeline.running.runtime import Pipeline
from remesh.pipeline.running.stage import Cut, Stage
from remesh.pipeline.schedules import SCHEDULES
from remesh.pipeline.step_simulation import Transfers
from remesh.testbed.pool import DIED, RankPool
from tests.fake_nccl import believed_group

WIDTH, NUM_MICROBATCHES, SAMPLES = 8, 4, 16


class Gated(nn.Module):
    """Two linear layers, which tensor parallelism cuts between them, and a residual."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.double()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


def cut_over(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((made - target) ** 2).mean()


def alone(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor, run: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The oracle: gradients are added micro-batch after micro-batch; the loss."""
    losses = []
    for part, target in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
        losses.append(loss_of(run(modules, part), target))
        (losses[-1] / NUM_MICROBATCHES).backward()
    return torch.stack(losses).detach().mean()


def chain(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for module in modules:
        x = module(x)
    return x


def whole_of(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def check_gradients(module: nn.Module, oracle: nn.Module) -> None:
    for (name, mine), (_, other) in zip(module.named_parameters(), oracle.named_parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None, name
        torch.testing.assert_close(whole_of(mine.grad), other.grad, rtol=1e-12, atol=1e-14)


def meshes_of(sizes: list[int]) -> tuple[int, DeviceMesh]:
    """This rank's stage, and its mesh; all ranks make all meshes."""
    start, found = 0, None
    for index, size in enumerate(sizes):
        mesh = DeviceMesh("cpu", torch.arange(start, start + size), mesh_dim_names=("tp",))
        if start <= dist.get_rank() < start + size:
            found = (index, mesh)
        start += size
    assert found is not None
    return found


def train_tensor_parallel(schedule: str, sizes: list[int]) -> None:
    index, mesh = meshes_of(sizes)
    modules: list[nn.Module] = [Gated(seed) for seed in range(len(sizes))]
    x, y = numbers(SAMPLES, WIDTH, seed=1), numbers(SAMPLES, WIDTH, seed=2)
    loss = alone(modules, x, y, chain)
    module = cut_over(Gated(index), mesh) if mesh.size() > 1 else Gated(index)
    is_last = index == len(sizes) - 1
    stage = Stage(index, module, mesh, loss=loss_of if is_last else None)
    table = SCHEDULES[schedule](len(sizes), NUM_MICROBATCHES)
    report = Pipeline(stage, StageGraph.chain(len(sizes)), table, chunk_bytes=64).step(
        {"hidden": x} if index == 0 else {}, y if is_last else None
    )
    check_gradients(module, modules[index])
    assert not is_last or torch.allclose(report.loss, loss, rtol=1e-13)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        *(("1f1b", [2, 1]), ("eager-split", [1, 2]), ("1f1b", [2, 2]), ("eager-split", [1, 2, 1])),
        pytest.param("eager-split", [2, 1], marks=pytest.mark.slow),
        pytest.param("1f1b", [1, 2], marks=pytest.mark.slow),
        pytest.param("eager-split", [2, 2], marks=pytest.mark.slow),
        pytest.param("1f1b", [1, 2, 1], marks=pytest.mark.slow),
    ],
)
def test_stages_of_other_tensor_parallelism_train_together(ranks: RankPool, schedule: str, sizes: list[int]) -> None:
    ranks.run(train_tensor_parallel, sum(sizes), (schedule, sizes))


class Part(nn.Module):
    """A stage whose ranks each have a part of the values: every element is worked on for itself."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.sin(hidden * self.weight)


def local_part(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def train_cut_values(makes: Cut, takes: Cut, placements: tuple[list[Any], list[Any]], over_nccl: bool = False) -> None:
    rank = dist.get_rank()
    grids = [DeviceMesh("cpu", torch.arange(4 * index, 4 * index + 4).reshape(2, 2)) for index in (0, 1)]
    index = rank // 4
    mesh = grids[index]
    x, y = numbers(SAMPLES, WIDTH, seed=1), numbers(SAMPLES, WIDTH, seed=2)
    modules: list[nn.Module] = [Part(0.5), Part(0.7)]
    alone(modules, x, y, chain)
    mine = Part([0.5, 0.7][index])

    def cut(whole: torch.Tensor) -> list[torch.Tensor]:
        return [local_part(part, mesh, placements[index]) for part in whole.chunk(NUM_MICROBATCHES)]

    loss = (lambda made, target: ((made - target) ** 2).sum() / (x.numel() / NUM_MICROBATCHES)) if index else None
    stage = Stage(index, mine, mesh, makes={"hidden": makes}, takes={"hidden": takes}, loss=loss)
    table = SCHEDULES["eager-split"](2, NUM_MICROBATCHES)
    with believed_group() if over_nccl else nullcontext() as group:
        pipeline = Pipeline(stage, StageGraph.chain(2), table, group=group, chunk_bytes=64)
        pipeline.step({"hidden": cut(x)} if index == 0 else {}, cut(y) if index == 1 else None)
    # Each rank has the share of its elements; replicas have the same share.
    total = mine.weight.grad.clone()  # type: ignore[union-attr]
    for axis, placement in enumerate(placements[index]):
        if isinstance(placement, Shard):
            dist.all_reduce(total, group=mesh.get_group(axis))
    torch.testing.assert_close(total, modules[index].weight.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("makes", "takes", "placements"),
    [
        ("S0R", "RS0", ([Shard(0), Replicate()], [Shard(1), Replicate()])),
        ([Shard(0), Shard(1)], "S01R", ([Shard(0), Shard(1)], [Shard(0), Shard(0)])),
        (("RR"), "S1S0", ([Replicate(), Replicate()], [Shard(1), Shard(0)])),
    ],
)
def test_values_lie_as_each_stage_says(ranks: RankPool, makes: Cut, takes: Cut, placements: Any) -> None:
    ranks.run(train_cut_values, 8, (makes, takes, placements))


def test_so_they_do_over_nccl_where_a_crossing_is_many_messages(ranks: RankPool) -> None:
    placements = ([Replicate(), Replicate()], [Shard(1), Shard(0)])
    ranks.run(train_cut_values, 8, ("RR", "S1S0", placements, True))


def train_data_parallel() -> None:
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("dp",)) for ranks in ([0, 1], [2, 3])]
    index, mesh = rank // 2, meshes[rank // 2]
    modules: list[nn.Module] = [Gated(0), Gated(1)]
    x, y = numbers(SAMPLES, WIDTH, seed=1), numbers(SAMPLES, WIDTH, seed=2)
    loss = alone(modules, x, y, chain)
    mine = Gated(index)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=0.01)
    oracle = torch.optim.AdamW(modules[index].parameters(), lr=0.01)

    def cut(whole: torch.Tensor) -> list[torch.Tensor]:
        return [local_part(part, mesh, [Shard(0)]) for part in whole.chunk(NUM_MICROBATCHES)]

    rows = {"hidden": "S0R"}
    stage = Stage(index, mine, mesh, rows, rows, loss_of if index else None, data_axes=("dp",))
    pipeline = Pipeline(stage, StageGraph.chain(2), SCHEDULES["1f1b-split"](2, NUM_MICROBATCHES))
    report = pipeline.step({"hidden": cut(x)} if index == 0 else {}, cut(y) if index else None)
    check_gradients(mine, modules[index])
    if index:
        total = report.loss.clone()  # type: ignore[union-attr]
        dist.all_reduce(total, group=mesh.get_group())
        torch.testing.assert_close(total / 2, loss)
    optimizer.step(), oracle.step()
    for one, other in zip(mine.parameters(), modules[index].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_data_parallel_ranks_of_a_stage_step_alike(ranks: RankPool) -> None:
    ranks.run(train_data_parallel, 4)


def train_in_three_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, share = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    modules: list[nn.Module] = [Gated(0), Gated(1)]
    x, y = numbers(SAMPLES, WIDTH, seed=1), numbers(SAMPLES, WIDTH, seed=2)
    alone(modules, x, y, chain)
    mine = cut_over(Gated(index), mesh["tp"])

    def cut(whole: torch.Tensor) -> list[torch.Tensor]:
        return [part.chunk(2)[share] for part in whole.chunk(NUM_MICROBATCHES)]

    rows = {"hidden": "S0R"}
    stage = Stage(index, mine, mesh["dp", "tp"], rows, rows, loss_of if index else None, data_axes=("dp",))
    pipeline = Pipeline(stage, StageGraph.chain(2), SCHEDULES["eager-split"](2, NUM_MICROBATCHES))
    pipeline.step({"hidden": cut(x)} if index == 0 else {}, cut(y) if index else None)
    check_gradients(mine, modules[index])


def test_stages_with_data_and_tensor_parallelism_train_together(ranks: RankPool) -> None:
    ranks.run(train_in_three_dimensions, 8)


class Down(nn.Module):
    """Makes a value for the next stage, one for a later one, and numbers without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.linear(x)
        return {"hidden": torch.tanh(hidden), "skip": hidden.t().contiguous().t(), "sign": (hidden > 0).long()}


class Middle(Gated):
    """Changes what it gets; the lone weight reaches the output by no way that an input goes."""

    def __init__(self) -> None:
        super().__init__(4)
        self.lone = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"deep": super().forward(hidden).reshape(-1, WIDTH), "bias": torch.exp(self.lone)}


class Up(nn.Module):
    """Joins them again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(2 * WIDTH, WIDTH).double()

    def forward(self, deep: torch.Tensor, skip: torch.Tensor, sign: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([deep, skip * sign], dim=1)) * bias


SKIPPING = StageGraph(
    3, (Edge(0, 1, "hidden"), Edge(0, 2, "skip"), Edge(0, 2, "sign"), Edge(1, 2, "deep"), Edge(1, 2, "bias"))
)


def run_skipping(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    made = modules[0](x)
    deeper = modules[1](made["hidden"])
    return modules[2](**deeper, skip=made["skip"], sign=made["sign"])


def train_skipping(schedule: str, transfers: Transfers) -> int:
    rank = dist.get_rank()
    modules: list[nn.Module] = [Down(), Middle(), Up()]
    mine: nn.Module = [Down(), Middle(), Up()][rank]
    x, y = numbers(SAMPLES, WIDTH, seed=1), numbers(SAMPLES, WIDTH, seed=2)
    loss = alone(modules, x, y, run_skipping)
    stage = Stage(rank, mine, loss=loss_of if rank == 2 else None)
    table = SCHEDULES[schedule](3, NUM_MICROBATCHES)
    pipeline = Pipeline(stage, SKIPPING, table, transfers=transfers)
    report = pipeline.step({"x": x} if rank == 0 else {}, y if rank == 2 else None)
    assert rank < 2 or torch.equal(report.loss, loss)  # type: ignore[arg-type]
    for (name, one), other in zip(mine.named_parameters(), modules[rank].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    assert {name for name in report.passages if str(rank) in name} == set(report.passages)
    return report.peak_stashes


@pytest.mark.parametrize(
    ("schedule", "transfers"),
    [
        ("1f1b", Transfers.ASYNC),
        ("1f1b", Transfers.BLOCKING),
        ("eager-split", Transfers.BLOCKING),
        ("eager-1f1b", Transfers.ASYNC),
        ("eager-split", Transfers.ASYNC),
    ],
)
def test_skip_connections_give_the_bits_of_one_process(ranks: RankPool, schedule: str, transfers: Transfers) -> None:
    peaks = ranks.run(train_skipping, 3, (schedule, transfers))
    assert peaks == ([3, 2, 1] if schedule == "1f1b" else [4, 3, 1])


def run_signals() -> float:
    rank = dist.get_rank()
    stage = Stage(rank, Gated(rank), loss=loss_of if rank == 2 else None)
    pipeline = Pipeline(stage, StageGraph.chain(3), SCHEDULES["1f1b"](3, NUM_MICROBATCHES), payload=Payload.SIGNALS)
    x, y = numbers(SAMPLES, WIDTH, seed=1), torch.zeros(SAMPLES, WIDTH, dtype=torch.float64)
    report = pipeline.step({"hidden": x} if rank == 0 else {}, y if rank == 2 else None)
    return float(report.loss) if report.loss is not None else -1.0


def test_signals_carry_no_values(ranks: RankPool) -> None:
    assert ranks.run(run_signals, 3) == [-1.0, -1.0, 0.0]


# --- what is wrong is told on all ranks ---


def meet_errors() -> list[str]:
    rank = dist.get_rank()
    two = StageGraph.chain(2)
    plain = SCHEDULES["1f1b"](2, 4)
    x, y = torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double()
    told = []

    def meet(stage: Stage, graph: StageGraph, table: Any, batch: Any, target: Any, **options: Any) -> None:
        with pytest.raises((Error, RuntimeError)) as raised:
            pipeline = Pipeline(stage, graph, table, **options)
            pipeline.step(batch if rank == 0 else {}, target if rank == 1 else None)
        told.append(f"{type(raised.value).__name__}: {raised.value}")

    mine = Stage(rank, Gated(rank), loss=loss_of if rank else None)
    meet(mine, two, plain, {"hidden": x[:6]}, y)
    meet(mine, two, plain, {"hidden": x[:3]}, y)
    meet(mine, two, plain, {"hidden": [x[:2], x[:2], x[:1], x[:2]]}, y)
    meet(mine, two, plain, {"hidden": [x[:2]] * 3}, y)
    meet(mine, two, SCHEDULES["1f1b"](2, 4 + rank), {"hidden": x}, y)
    meet(mine, two, SCHEDULES["1f1b"](3, 4), {"hidden": x}, y)
    meet(Stage(0, Gated(0)), two, plain, {"hidden": x}, y)
    meet(Stage(2 * rank, Gated(0)), two, plain, {"hidden": x}, y)
    meet(mine, StageGraph(2, (Edge(0, 1, "a"), Edge(0, 1, "b"))), plain, {"hidden": x}, y)
    meet(Stage(rank, Gated(rank)), two, plain, {"hidden": x}, None)
    meet(Stage(rank, Gated(rank)), two, plain, {"hidden": x}, y)
    meet(mine, two, plain, {"hidden": x[:, :3]}, y)
    meet(Stage(rank, Gated(rank), makes={"hidden": "S1"}, loss=loss_of), two, plain, {"hidden": x}, y)
    meet(mine, two, plain, {"hidden": x}, y, host_of={0: "a", 1: f"{rank}"})
    meet(mine, two, plain, {"hidden": x}, y, chunk_bytes=1 if rank else 1024)
    meet(mine, two, plain, {"hidden": x}, y, max_staging_bytes=1000 + rank)
    meet(mine, two, plain, {"hidden": x}, y, **({} if rank else {"transfers": Transfers.ASYNC}))
    meet(mine, two, plain, x, y)
    meet(mine, two, plain, {"hidden": x}, y, chunk_bytes=1)
    return told


def test_mistakes_are_the_same_error_on_all_ranks_before_the_first_step(ranks: RankPool) -> None:
    first, second = ranks.run(meet_errors, 2)
    assert first == second
    expected = [
        "6 samples, expected a multiple of 4",
        "3 samples, expected a multiple of 4",
        "micro-batch 2 is torch.float64 of shape (1, 8)",
        "it has 3 micro-batches, the schedule 4",
        "expected one graph, schedule and options on all 2 ranks",
        "it has 3 stages",
        "stage 0 is on mesh",
        "rank 1 works for stage 2",
        "expected a dict with ['a', 'b']",
        "expected one number",
        "stage 1 has no loss",
        "mat1 and mat2 shapes",
        "S1 does not fit",
        "{'host_of': \"[(0, 'a'), (1, '1')]\"} on rank 1",
        "{'chunk_bytes': '1'} on rank 1",
        "{'max_staging_bytes': '1001'} on rank 1",
        "{'transfers': 'async'} on rank 0",
        "the batch of rank 0 is of type Tensor",
        "chunk_bytes is 1",
    ]
    for text, part in zip(first, expected, strict=True):
        assert part in text, text


def make_wrong_ones() -> None:
    stage, graph, table = Stage(0, Gated(0)), StageGraph.chain(1), SCHEDULES["1f1b"](1, 4)
    for options, match in (
        ({"paylod": Payload.SIGNALS}, "did you mean 'payload'"),
        ({"transfers": "blocking"}, "expected Transfers"),
        ({"chunk_bytes": 1.5}, "expected int"),
    ):
        with pytest.raises(ConfigError, match=match):
            Pipeline(stage, graph, table, **options)  # type: ignore[arg-type]


def test_options_that_cannot_be_are_refused_when_a_pipeline_is_made(ranks: RankPool) -> None:
    ranks.run(make_wrong_ones, 1)


def make_while_others_wait() -> None:
    rank = dist.get_rank()
    stage = Stage(rank, Gated(rank), loss=loss_of if rank else None)
    if rank:  # the first has long been made when this one is
        dist.barrier()
    pipeline = Pipeline(stage, StageGraph.chain(2), SCHEDULES["1f1b"](2, NUM_MICROBATCHES))
    if not rank:
        dist.barrier()
    x, y = numbers(SAMPLES, WIDTH, seed=1), numbers(SAMPLES, WIDTH, seed=2)
    pipeline.step({"hidden": x} if rank == 0 else {}, y if rank else None)


def test_making_a_pipeline_talks_to_nobody(ranks: RankPool) -> None:
    ranks.run(make_while_others_wait, 2)


class Fickle(nn.Module):
    """Makes another shape, raises, or dies, when called for a given time."""

    def __init__(self, act: str, call: int) -> None:
        super().__init__()
        self.linear, self.act, self.call = nn.Linear(WIDTH, WIDTH), act, call

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.call -= 1
        if self.call == 0 and self.act == "die":
            os.kill(os.getpid(), 9)
        if self.call == 0 and self.act == "raise":
            raise KeyError("no such thing")
        made = self.linear(hidden)
        return made[:1] if self.call == 0 and self.act == "shape" else made


def lose_in_step(act: str, where: int, schedule: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = Fickle(act if rank == where else "", 4)
    stage = Stage(rank, module, loss=torch.sum if rank == size - 1 else None)
    pipeline = Pipeline(stage, StageGraph.chain(size), SCHEDULES[schedule](size, 8))
    with pytest.raises((PeerError, PipelineError, KeyError)) as raised:
        pipeline.step({"hidden": torch.randn(16, WIDTH)} if rank == 0 else {})
    kinds = (PeerError, PipelineError, KeyError)
    return next(kind.__name__ for kind in kinds if isinstance(raised.value, kind))


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_rank_that_dies_ends_the_step_for_all(ranks: RankPool, where: int) -> None:
    # A rank that waits for the timeout of its group is stuck by then: the run has a shorter one.
    told = ranks.run(lose_in_step, 3, ("die", where, "1f1b"), dying=[where])
    assert told == ["PeerError" if rank != where else DIED for rank in range(3)]


@pytest.mark.parametrize(("act", "name"), [("raise", "KeyError"), ("shape", "PipelineError")])
def test_a_rank_that_raises_ends_the_step_for_all(ranks: RankPool, act: str, name: str) -> None:
    assert ranks.run(lose_in_step, 3, (act, 1, "eager-split")) == ["PeerError", name, "PeerError"]
