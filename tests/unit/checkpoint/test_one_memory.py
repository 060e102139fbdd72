"""Tensors of several names in one memory get the values of all of them, or the load is refused by name."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from tests.profiles import seeds
from tests.unit.layout.shared_views import draw_views, fills_or_refuses


class Tied(torch.nn.Module):
    """A model whose output layer is its embedding, or has the same shape."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("seed", seeds(12, quick=3))
def test_a_load_fills_every_name_or_tells(seed: int, tmp_path: Path) -> None:
    chance = random.Random(1000 + seed)
    filled = set()
    for number in range(20):
        views = draw_views(chance)
        # As they are, which fits, or some of them with values of their own.
        saved = [view.clone() + (chance.random() < 0.3) for view in views]
        place = tmp_path / str(number)
        remesh.save({f"w{at}": values for at, values in enumerate(saved)}, place)
        for view in views:
            view.zero_()
        load = partial(remesh.load, {f"w{at}": view for at, view in enumerate(views)}, place)
        filled.add(fills_or_refuses(load, views, saved, CheckpointMismatchError, "shares memory with"))
    assert False in filled


def test_a_tied_model_takes_what_a_tied_one_saved_and_refuses_what_is_not_alike(tmp_path: Path) -> None:
    remesh.save({"model": Tied(tied=True).state_dict()}, tmp_path / "tied")
    apart = Tied(tied=False)
    remesh.save({"model": apart.state_dict()}, tmp_path / "apart")
    remesh.load({"model": Tied(tied=True)}, tmp_path / "tied")
    with pytest.raises(CheckpointMismatchError, match=r"'model.embedding.weight': it shares memory with 'model.head.w"):
        remesh.load({"model": Tied(tied=True)}, tmp_path / "apart")
    alone = Tied(tied=True)
    remesh.load({"model": {"head.weight": alone.head.weight}}, tmp_path / "apart")
    assert torch.equal(alone.embedding.weight, apart.head.weight)


def test_pieces_of_one_buffer_that_is_not_contiguous_get_each_its_own(tmp_path: Path) -> None:
    remesh.save({"a": torch.zeros(4, 2), "b": torch.ones(4, 2)}, tmp_path)
    buffer = torch.full((40,), 7.0)[::2]

    def piece(first: int) -> Piece:
        halves = (Box((0, 0), (2, 2)), Box((2, 0), (4, 2)))
        return Piece(buffer, (4, 2), tuple(Shard(0, box, first + 4 * at) for at, box in enumerate(halves)))

    with pytest.raises(CheckpointMismatchError, match="shares memory with"):
        remesh.load({"a": piece(0), "b": piece(4)}, tmp_path)
    remesh.load({"a": piece(0), "b": piece(8)}, tmp_path)
    assert buffer.tolist() == [0.0] * 8 + [1.0] * 8 + [7.0] * 4
