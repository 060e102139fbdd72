"""Planned reads fill every wanted element once, from a chunk that has it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from remesh.checkpoint.plan.manifest import Extent, Manifest, StoredChunk, StoredTensor
from remesh.checkpoint.plan.reads import Want, find_objects, plan_reads
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.layout import Box


def stored(shape: tuple[int, ...], boxes: list[Box]) -> StoredTensor:
    chunks = [StoredChunk(box, Extent(f"__{index % 2}_0.distcp", 100 * index, 100)) for index, box in enumerate(boxes)]
    return StoredTensor("float32", shape, tuple(chunks))


def manifest(**tensors: StoredTensor) -> Manifest:
    return Manifest(tensors, {"rng/shard_0_1": Extent("__0_0.distcp", 0, 9)})


@st.composite
def partitions(draw: st.DrawFn, whole: Box, depth: int = 3) -> list[Box]:
    """The whole box cut at random, in random order."""
    boxes = [whole]
    for _ in range(draw(st.integers(0, depth))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, box.ndim - 1))
        boxes += box.split(dim, draw(st.integers(box.start[dim], box.stop[dim])))
    return draw(st.permutations([box for box in boxes if not box.is_empty]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = Box.of_shape(shape)
    wanted = draw(partitions(whole)) + draw(st.lists(st.just(whole), max_size=1))
    return shape, draw(partitions(whole)), wanted


@given(cases())
def test_reads_do_what_indexing_would(case: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    shape, chunks, boxes = case
    whole = np.arange(np.prod(shape)).reshape(shape)
    results = [np.full(box.shape, -1) for box in boxes]
    reads = plan_reads([Want("w", box, shape) for box in boxes], manifest(w=stored(shape, chunks)))
    for read in reads:
        chunk = whole[read.chunk.box.slices()]
        for copy in read.copies:
            target = results[copy.want][copy.box.relative_to(boxes[copy.want]).slices()]
            assert (target == -1).all(), "no element is written twice"
            target[...] = chunk[copy.box.relative_to(read.chunk.box).slices()]
    for box, result in zip(boxes, results, strict=True):
        assert (result == whole[box.slices()]).all()


@given(cases())
def test_each_chunk_is_read_at_most_once_in_file_order(case: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    shape, chunks, boxes = case
    reads = plan_reads([Want("w", box, shape) for box in boxes], manifest(w=stored(shape, chunks)))
    extents = [read.chunk.extent for read in reads]
    assert extents == sorted(set(extents))


def test_scalars_and_empty_wants_have_reads_of_their_own_kind() -> None:
    scalar = stored((), [Box((), ())])
    assert len(plan_reads([Want("s", Box((), ()), ())], manifest(s=scalar))) == 1
    line = stored((4,), [Box((0,), (4,))])
    assert plan_reads([Want("w", Box((2,), (2,)), (4,))], manifest(w=line)) == ()


def test_what_is_not_stored_is_an_error_that_names_what_is() -> None:
    holds = manifest(weight=stored((4,), [Box((0,), (2,))]))
    with pytest.raises(CheckpointingException, match="'wieght'.*it holds 1, 'weight'; did you mean 'weight'"):
        plan_reads([Want("wieght", Box((0,), (4,)), (4,))], holds)
    with pytest.raises(
        CheckpointingException, match=r"Global shape mismatch for loaded \(\(4,\)\) and expected \(\(5,\)\)"
    ):
        plan_reads([Want("weight", Box((0,), (5,)), (5,))], holds)
    with pytest.raises(CheckpointingException, match=r"1 requested boxes are in no stored chunk, the first is \[2:4\]"):
        plan_reads([Want("weight", Box((0,), (4,)), (4,))], holds)
    with pytest.raises(CheckpointingException, match="wanted objects are not in the checkpoint, 'o/shard_0_1'"):
        find_objects(["o/shard_0_1"], holds)


def test_allowed_shape_mismatch_reads_the_overlap() -> None:
    holds = manifest(w=stored((8, 2), [Box((0, 0), (4, 2)), Box((4, 0), (8, 2))]))
    (read,) = plan_reads([Want("w", Box((6, 0), (12, 2)), (12, 2), True)], holds)
    assert [copy.box for copy in read.copies] == [Box((6, 0), (8, 2))]
    assert plan_reads([Want("w", Box((9, 0), (12, 2)), (12, 2), True)], holds) == ()
    with pytest.raises(CheckpointingException, match="Global shape mismatch"):
        plan_reads([Want("w", Box((0,), (12,)), (12,), True)], holds)


def test_flattened_tensors_of_older_writers_are_refused_by_name() -> None:
    line = stored((2, 6), [Box((0, 0), (2, 6))])
    with pytest.raises(CheckpointingException, match="'w', are stored flattened"):
        plan_reads([Want("w", Box((0,), (12,)), (12,))], Manifest({"w": line}, {}, frozenset({"w"})))
