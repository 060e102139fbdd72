"""Which tensors share memory is found as by listing every byte; of a copy a piece gets its own elements back."""

from __future__ import annotations

import random

import pytest
import torch

from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.layout.torch_memory import find_shared, is_there, put_back
from tests.profiles import seeds
from tests.unit.layout.shared_views import bytes_by_address, draw_views


@pytest.mark.parametrize("seed", seeds(20, quick=6))
def test_tensors_that_share_bytes_are_found_as_by_listing_them(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        views = draw_views(chance)
        listed = [set(bytes_by_address(view, view)) for view in views]
        sharing = {(a, b) for b in range(len(views)) for a in range(b) if listed[a] & listed[b]}
        groups = find_shared(views)
        together = {(a, b) for group in groups for b in group for a in group if a < b}
        assert sharing <= together
        assert all(any(pair in sharing for pair in together if set(pair) <= set(group)) for group in groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shows", [lambda one: one, torch.conj], ids=["itself", "its conjugate"])
def test_only_the_boxes_of_a_piece_get_the_values_of_a_copy(dtype: torch.dtype, shows: object) -> None:
    assert callable(shows)
    tensor = shows(torch.zeros(4, 6, dtype=dtype).t())
    held = Piece(tensor, (2, 3), (Shard(0, Box((0, 0), (2, 3)), 1, (8, 2)),))
    copy = torch.ones(6, 4, dtype=dtype)
    assert not is_there(held, copy)
    put_back(held, copy)
    assert is_there(held, copy)
    places = [1, 3, 5, 9, 11, 13]
    expected = [float(at in places) for at in range(24)]
    assert tensor.resolve_conj().contiguous().view(-1).to(torch.complex64).real.tolist() == expected
