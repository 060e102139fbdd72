"""What a stage may be and do: what cannot be right is refused by name on all ranks, and no call is made of its module
but the program's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from remesh.foundation.errors import PeerError
from remesh.pipeline import Edge, Pipeline, PipelineError, Stage, StageGraph, Tie
from remesh.pipeline.schedules import SCHEDULES
from remesh.testbed.pool import RankPool
from tests.procs.pipeline.random_meshes import torch_schedule

WIDTH, ROWS, NUM_MICROBATCHES = 4, 6, 3
PAIR = StageGraph.chain(2)
THREE = StageGraph(3, (Edge(0, 1, "hidden"), Edge(0, 2, "hidden"), Edge(1, 2, "deep")))


class Layer(nn.Module):
    """One linear layer, what is done with what it makes, and whether it writes into what it takes."""

    def __init__(self, finish: Callable[..., Any] = lambda made, **taken: made, is_writing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.finish, self.is_writing = nn.Linear(WIDTH, WIDTH), finish, is_writing

    def forward(self, **taken: torch.Tensor) -> Any:
        value = next(iter(taken.values()))
        if self.is_writing:
            value.mul_(2.0)
        return self.finish(self.linear(value), **taken)


def mesh_of(*ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("d",))


def dtensor(placement: Any, mesh: DeviceMesh) -> Callable[..., Any]:
    return lambda made, **taken: DTensor.from_local(made, mesh, [placement])


def refusal(stage: Stage, graph: StageGraph, within: Any = contextlib.nullcontext) -> str:
    rows = ROWS * NUM_MICROBATCHES
    pipeline = Pipeline(stage, graph, SCHEDULES["1f1b"](graph.num_stages, NUM_MICROBATCHES))
    with pytest.raises(PipelineError) as raised, within():
        pipeline.step({"hidden": torch.ones(rows, WIDTH)} if stage.index == 0 else {})
    return str(raised.value)


def meet_refusals() -> list[str]:
    """Two stages: the first on ranks 0 and 1, the second on rank 2."""
    rank = dist.get_rank()
    pair, one = mesh_of(0, 1), mesh_of(2)
    last = Stage(1, Layer(), one, loss=torch.sum)
    told = []

    def meet(make: Callable[[], Stage], within: Any = contextlib.nullcontext) -> None:
        told.append(refusal(make() if rank < 2 else last, PAIR, within))

    rows = {"makes": {"hidden": "S0R"}, "data_axes": ("d",)}
    meet(lambda: Stage(0, DistributedDataParallel(Layer(), process_group=pair.get_group()), pair, **rows))
    meet(lambda: Stage(0, fully_shard(Layer(), mesh=pair), pair, makes={"hidden": "S0R"}))
    meet(lambda: Stage(0, Layer(), pair, data_axes=("d",)))
    meet(lambda: Stage(0, Layer(), pair), torch.no_grad)
    meet(lambda: Stage(0, Layer(), pair), torch.inference_mode)
    meet(lambda: Stage(0, Layer(lambda made, **taken: (made, made)), pair))
    meet(lambda: Stage(0, Layer(lambda made, **taken: {"hidden": (made, made)}), pair))
    meet(lambda: Stage(0, Layer(dtensor(Partial("max"), pair)), pair))
    meet(lambda: Stage(0, Layer(dtensor(Shard(1), pair)), pair, makes={"hidden": "S0R"}))
    tied = StageGraph(2, PAIR.edges, (Tie(((0, "none"), (1, "none"))),))
    told.append(refusal(Stage(0, Layer(), pair) if rank < 2 else last, tied))
    return told


def test_what_cannot_be_right_is_refused_by_name_on_all_ranks(ranks: RankPool) -> None:
    first, *others = ranks.run(meet_refusals, 3)
    assert all(each == first for each in others)
    expected = [
        "wrapped in DistributedDataParallel, which expects a backward after each forward",
        "sharded by FSDP, which averages gradients over 2 ranks, expected the 1 of the stage's data axes ()",
        "nothing says how 'hidden' lies on its 2 data-parallel ranks",
        "is in torch.no_grad, expected gradients on",
        "is in torch.inference_mode, expected gradients on",
        "expected a dict with ['hidden'] from its module, found tuple",
        "it made 'hidden' of type tuple, expected a tensor",
        "'hidden' is partial by ['max'], expected one of ('sum', 'avg')",
        "'hidden' is a DTensor with S(1) on axis 0 of the mesh, but is declared S0R",
        "looking for the tied weight none of stage 0 = none of stage 1: stage 0 has no parameter 'none', found",
    ]
    for text, part in zip(first, expected, strict=True):
        assert part in text, text


def meet_bad_losses() -> list[str]:
    """Two stages of two ranks."""
    rank = dist.get_rank()
    meshes = [mesh_of(0, 1), mesh_of(2, 3)]
    rows = {"hidden": "S0R"}

    def of_all(made: torch.Tensor) -> Any:
        return DTensor.from_local(made.sum(), meshes[1], [Partial()])

    stage = Stage(rank // 2, Layer(), meshes[rank // 2], rows, rows, of_all if rank > 1 else None, ("d",))
    return [refusal(stage, PAIR)]


def test_a_loss_of_all_data_parallel_ranks_is_refused(ranks: RankPool) -> None:
    told = ranks.run(meet_bad_losses, 4)
    assert all(each == told[0] for each in told) and "expected the loss of this rank's own samples" in told[0][0]


def write_where_others_look(case: str) -> str:
    """The first stage makes what the second writes into."""
    rank = dist.get_rank()
    graph, finish = PAIR, Layer().finish
    if case == "a later stage takes it, too":
        graph = THREE
    elif case == "it takes an alias, too":
        graph = StageGraph(2, (Edge(0, 1, "hidden"), Edge(0, 1, "view")))
        finish = lambda made, **taken: {"hidden": made, "view": made.t()}  # noqa: E731
    else:
        finish = lambda made, **taken: module.kept  # noqa: E731
    module = Layer(finish if rank == 0 else Layer().finish, is_writing=rank == 1)
    module.register_buffer("kept", torch.ones(ROWS, WIDTH))
    return refusal(Stage(rank, module, loss=torch.sum if rank == graph.num_stages - 1 else None), graph)


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [("a later stage takes it, too", 3), ("it takes an alias, too", 2), ("it is a buffer of the maker", 2)],
)
def test_a_write_that_another_stage_would_have_to_see_is_refused(ranks: RankPool, case: str, num_ranks: int) -> None:
    told = ranks.run(write_where_others_look, num_ranks, (case,))
    assert all(each == told[0] for each in told)
    assert "its module has written into 'hidden', expected it left as it came" in told[0]


def write_where_nobody_looks() -> None:
    rank = dist.get_rank()
    stage = Stage(rank, Layer(is_writing=rank == 2), loss=torch.sum if rank == 2 else None)
    pipeline = Pipeline(stage, THREE, SCHEDULES["1f1b"](3, NUM_MICROBATCHES))
    pipeline.step({"hidden": torch.ones(ROWS, WIDTH)} if rank == 0 else {})


def test_the_last_stage_that_takes_a_value_may_write_there(ranks: RankPool) -> None:
    ranks.run(write_where_nobody_looks, 3)


def change_placements() -> str:
    rank = dist.get_rank()
    pair, calls = mesh_of(0, 1), []

    def of_calls(made: torch.Tensor, **taken: torch.Tensor) -> Any:
        calls.append(0)
        return DTensor.from_local(made, pair, [Partial() if len(calls) == 3 else Replicate()])

    module = Layer(of_calls) if rank < 2 else Layer()
    stage = Stage(rank // 2, module, pair if rank < 2 else None, loss=torch.sum if rank == 2 else None)
    with pytest.raises((PipelineError, PeerError)) as raised:
        batch = {"hidden": torch.ones(ROWS * NUM_MICROBATCHES, WIDTH)} if rank < 2 else {}
        Pipeline(stage, PAIR, SCHEDULES["gpipe"](2, NUM_MICROBATCHES)).step(batch)
    return str(raised.value)


def test_a_value_is_the_same_kind_of_dtensor_in_all_micro_batches(ranks: RankPool) -> None:
    told = ranks.run(change_placements, 3)
    assert all("made 'hidden' with placements (Partial(sum),), expected (Replicate(),)" in each for each in told[:2])


def meet_other_rows() -> list[str]:
    rank = dist.get_rank()
    schedule = torch_schedule("ZBVZeroBubble", NUM_MICROBATCHES + 1)  # rank 0 has the first stage and the last
    last = {"loss": torch.sum}
    stages = [Stage(at, Layer(), **(last if at == 3 else {})) for at in ((0, 2), (1, 3))[rank]]
    with pytest.raises(PipelineError) as raised:
        Pipeline(stages, StageGraph.chain(4), schedule).step({"hidden": torch.ones(8, WIDTH)} if rank == 0 else {})
    return [str(raised.value)]


def test_a_rank_has_the_stages_of_its_row(ranks: RankPool) -> None:
    first, second = ranks.run(meet_other_rows, 2)
    assert (
        first == second
        and "rank 0 has stages [0, 2], the schedule 'ZBVZeroBubble' has a row of stages [0, 3]" in first[0]
    )


def count_calls() -> list[float]:
    rank = dist.get_rank()
    seen: list[float] = []

    def note(made: torch.Tensor, **taken: torch.Tensor) -> torch.Tensor:
        seen.append(float(next(iter(taken.values())).sum()))
        return made

    stage = Stage(rank, Layer(note), loss=torch.sum if rank == 1 else None)
    pipeline = Pipeline(stage, PAIR, SCHEDULES["eager-split"](2, NUM_MICROBATCHES))
    for step in range(2):
        parts = [torch.full((ROWS, WIDTH), float(NUM_MICROBATCHES * step + number)) for number in range(3)]
        pipeline.step({"hidden": parts} if rank == 0 else {})
    return seen


def test_a_module_is_called_once_for_each_micro_batch_and_for_nothing_else(ranks: RankPool) -> None:
    first, second = ranks.run(count_calls, 2)
    assert first == [ROWS * WIDTH * number for number in range(2 * NUM_MICROBATCHES)]
    assert len(second) == 2 * NUM_MICROBATCHES
