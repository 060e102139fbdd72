"""Pipelines of random stages on random meshes have the gradients of one process."""

from __future__ import annotations

import pytest

from remesh.testbed.pool import RankPool
from tests.procs.pipeline.random_meshes import draw_case, train_case
from tests.profiles import seeds


@pytest.mark.parametrize("seed", seeds(30, quick=10))
def test_random_stages_on_random_meshes_have_the_gradients_of_one_process(ranks: RankPool, seed: int) -> None:
    ranks.run(train_case, draw_case(seed).size, (seed,))
