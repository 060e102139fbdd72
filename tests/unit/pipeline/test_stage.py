"""A stage at work on micro-batches: what it keeps, and how its values are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.stage import Stage, StageWork, cut_microbatches
from remesh.pipeline.running.values import cut_form, spec_of


@pytest.mark.parametrize(
    ("cut", "spec"),
    [
        (None, "RR"),
        ("S01R", "S01R"),
        ([Shard(1), Replicate()], "RS0"),
        ([Shard(0), Shard(0)], "S01R"),
        ([Replicate(), Shard(0), Shard(1)], "S1S2"),
    ],
)
def test_placements_are_the_specs_that_mean_the_same(cut: object, spec: str) -> None:
    assert spec_of(cut_form(cut or []), 2) == spec  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", [Partial(), Shard(2)])
def test_values_that_are_not_whole_are_refused(placement: object) -> None:
    with pytest.raises(PipelineError, match="expected Shard of one of its dims, or Replicate"):
        spec_of(cut_form([placement]), 2)  # type: ignore[list-item]


def test_a_batch_is_cut_along_its_first_dim_and_a_sequence_is_taken_as_it_is() -> None:
    parts = cut_microbatches({"x": torch.arange(6), "y": [torch.ones(2), torch.zeros(2)]}, 2, "the")
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]
    assert [part["y"].tolist() for part in parts] == [[1, 1], [0, 0]]


def test_a_micro_batch_is_kept_from_its_forward_to_its_weights_gradients() -> None:
    work = StageWork(Stage(1, nn.Linear(3, 3)), ["hidden"], 4)
    gradients = {"hidden": torch.ones(2, 3)}
    for number in range(3):
        work.run_forward(number, {"input": torch.ones(2, 3)}, {}, None)
    kept = [work.num_stashes]
    work.run_input_backward(0, gradients)
    kept.append(work.num_stashes)  # it waits for its weights' gradients and is kept
    work.run_weight_backward(0)
    kept.append(work.num_stashes)
    for number in (1, 2):
        work.run_backward(number, gradients)
    assert [*kept, work.num_stashes] == [3, 3, 2, 0]


def test_data_axes_are_axes_of_the_mesh() -> None:
    with pytest.raises(PipelineError, match="data axes among the mesh's"):
        Stage(0, nn.Identity(), data_axes=("dp",))
