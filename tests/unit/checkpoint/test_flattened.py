"""Flattened slices: their pieces, their stored form and reading it back, against brute force over indices."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from remesh import dist_checkpointing
from remesh.checkpoint.plan.flattened import reroute, stored_form, unflatten
from remesh.checkpoint.plan.manifest import Extent, Manifest, StoredChunk, StoredTensor
from remesh.dist_checkpointing import ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Global shape and number of parts in each dim."""
    ndim = draw(st.integers(1, 3))
    parts = draw(st.tuples(*[st.integers(1, 3)] * ndim))
    cells = draw(st.tuples(*[st.integers(1, 4)] * ndim))
    return tuple(p * n for p, n in zip(parts, cells, strict=True)), parts


def slices_of(
    shape: tuple[int, ...], parts: tuple[int, ...], cuts: list[int], whole: torch.Tensor
) -> list[ShardedTensor]:
    """Every slice of every cell, cut at the same places."""
    cell_shape = tuple(n // p for n, p in zip(shape, parts, strict=True))
    size = math.prod(cell_shape)
    bounds = [0, *sorted(cut % (size + 1) for cut in cuts), size]
    found = []
    for cell in np.ndindex(*parts):
        index = tuple(slice(c * n, (c + 1) * n) for c, n in zip(cell, cell_shape, strict=True))
        data = whole[index].reshape(-1)
        offsets = [(axis, at, parts[axis]) for axis, at in enumerate(cell)]
        for start, stop in itertools.pairwise(bounds):
            found.append(
                ShardedTensor.from_rank_offsets_flat(
                    "w", data[start:stop].clone(), cell_shape, *offsets, flattened_range=slice(start, stop)
                )
            )
    return found


@given(grids(), st.lists(st.integers(0, 100), max_size=3))
def test_pieces_and_coordinates_are_the_elements_of_the_slice(
    grid: tuple[tuple[int, ...], tuple[int, ...]], cuts: list[int]
) -> None:
    whole = torch.arange(math.prod(grid[0])).reshape(grid[0])
    seen = torch.zeros_like(whole)
    for piece in slices_of(*grid, cuts, whole):
        assert piece.data is not None
        assert torch.equal(whole[piece.global_coordinates()], piece.data)
        for part in unflatten(piece):
            index = part.global_box().slices()
            assert part.data is not None
            assert torch.equal(whole[index], part.data)
            seen[index] += 1
    assert seen.eq(1).all()


@given(grids(), st.lists(st.integers(0, 100), max_size=3), grids(), st.lists(st.integers(0, 100), max_size=2))
def test_any_request_is_filled_from_any_stored_form(
    grid: tuple[tuple[int, ...], tuple[int, ...]],
    cuts: list[int],
    other: tuple[tuple[int, ...], tuple[int, ...]],
    other_cuts: list[int],
) -> None:
    shape, parts = grid
    whole = torch.arange(math.prod(shape)).reshape(shape)
    forms = [stored_form(one) for one in slices_of(shape, parts, cuts, whole) if one.data_shape[0]]
    file = torch.full(forms[0].global_shape, -1)
    for form in forms:
        file[form.global_box().slices()] = form.data_in_box()
    chunks = tuple(StoredChunk(form.global_box(), Extent("f", 0, 0)) for form in forms)
    manifest = Manifest(
        {"w": StoredTensor("int64", tuple(file.shape), chunks)}, {}, frozenset({"w"}), {"w": tuple(shape)}
    )
    wanted_parts = tuple(p if n % p == 0 else 1 for n, p in zip(shape, (*other[1], 1, 1, 1), strict=False))
    wanted = slices_of(shape, wanted_parts, other_cuts, torch.full(shape, -2))
    asked, copies = reroute(wanted, manifest)
    num_read = 0
    for tensor in asked:
        tensor.data_in_box().copy_(file[tensor.global_box().slices()])
        num_read += tensor.global_box().size
    for to, source in copies:
        to.copy_(source)
    for found, expected in zip(wanted, slices_of(shape, wanted_parts, other_cuts, whole), strict=True):
        assert torch.equal(found.data, expected.data)  # type: ignore[arg-type]
    assert num_read <= 1.1 * whole.numel(), "no more is asked for than needed"


def test_shapes_that_differ_and_gaps_are_refused(tmp_path: Path) -> None:
    whole = torch.arange(12).reshape(2, 6)
    dist_checkpointing.save({"w": slices_of((2, 6), (1, 2), [2], whole)[:3]}, tmp_path, validate_access_integrity=False)

    def ask(shape: tuple[int, int]) -> None:
        wanted = ShardedTensor.from_rank_offsets("w", torch.zeros(shape))
        dist_checkpointing.load({"w": wanted}, tmp_path)

    with pytest.raises(CheckpointingException, match="Global shape mismatch for loaded \\(\\(2, 6\\)\\)"):
        ask((2, 5))
    with pytest.raises(CheckpointingException, match="requested boxes are not in any stored slice"):
        ask((2, 6))


def test_narrowing_a_slice_keeps_its_elements_in_the_part() -> None:
    data = torch.arange(2, 11)
    piece = ShardedTensor.from_rank_offsets_flat("w", data, (4, 3), (0, 1, 2), flattened_range=slice(2, 11))
    (narrowed,) = piece.narrow(0, 1, 2)
    assert narrowed.data is not None
    assert narrowed.data.tolist() == [3, 4, 5, 6, 7, 8]
    assert (narrowed.flattened_range, narrowed.global_shape, narrowed.global_offset) == (slice(0, 6), (4, 3), (2, 0))
    tail = ShardedTensor.from_rank_offsets_flat("w", data[:3], (4, 3), flattened_range=slice(9, 12))
    assert tail.narrow(0, 0, 3) == []
    with pytest.raises(CheckpointingException, match="expected dim 0"):
        piece.narrow(1, 0, 1)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (slice(0, 13), "expected 0 <= start <= stop <= 12"),
        (slice(0, 4, 2), "no step"),
        (slice(0, 5), "expected the length of flattened_range, (5,)"),
        (None, "flattened_range is None"),
    ],
)
def test_slices_that_contradict_their_data_are_refused(held: slice | None, said: str) -> None:
    with pytest.raises(CheckpointingException) as caught:
        ShardedTensor.from_rank_offsets_flat("w", torch.zeros(4), (4, 3), flattened_range=held)
    assert said in str(caught.value)


def test_grid_questions_are_answered() -> None:
    piece = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4), (2, 1, 2), prepend_axis_num=1)
    assert piece.global_slice() == (1, slice(0, 2), slice(3, 6))
    assert piece.max_allowed_chunks() == (4, 1, 2)
    assert piece.local_chunk_offset_in_global() == (1, 0, 1)
    with pytest.raises(CheckpointingException, match="not flattened"):
        piece.local_coordinates()
