"""What several names are taken into one memory for gets the values of all of them, or the call is refused by name."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import remesh
from remesh.foundation.errors import PlanError
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.resharding import Resharder
from tests.profiles import seeds
from tests.unit.layout.shared_views import draw_views, fills_or_refuses


@pytest.mark.parametrize("seed", seeds(12, quick=3))
def test_a_move_fills_every_name_or_tells(seed: int) -> None:
    """Twice with one plan, so that copies which are kept are made anew."""
    chance = random.Random(seed)
    filled = set()
    for _ in range(40):
        views, resharder = draw_views(chance), Resharder()
        for _ in range(2):
            given = [view.clone() + (chance.random() < 0.3) for view in views]
            sides = ({f"w{at}": one for at, one in enumerate(some)} for some in (given, views))
            move = partial(resharder.reshard, *sides)
            filled.add(fills_or_refuses(move, views, given, PlanError, "are not what was given for them"))
    assert False in filled


def test_pieces_of_one_buffer_that_is_not_contiguous_get_each_its_own() -> None:
    buffer = torch.full((40,), 7.0)[::2]
    take = {
        name: Piece(buffer, (4, 2), (Shard(0, Box.of_shape((4, 2)), first),)) for name, first in (("a", 0), ("b", 8))
    }
    remesh.reshard({"a": torch.zeros(4, 2), "b": torch.ones(4, 2)}, take)
    assert buffer.tolist() == [0.0] * 8 + [1.0] * 8 + [7.0] * 4
