"""Outlines: the check of a thousand ranks at once says what the check of one entity after the other says."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, strategies as st

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.description_checks import object_problem, raise_problems, tensor_problem
from remesh.checkpoint.values.outline import Outline, check_outlines, outline_of
from remesh.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory


def spoil(entities: list[list[ShardedBase]], rng: random.Random) -> None:
    """Change one thing somewhere, which may or may not be a fault."""
    rank = rng.randrange(len(entities))
    if not entities[rank]:
        return
    at = rng.randrange(len(entities[rank]))
    one = entities[rank][at]
    kind = rng.choice(["drop", "again", "replica", "move", "dtype"])
    if kind == "drop":
        del entities[rank][at]
    elif kind == "again":
        entities[rng.randrange(len(entities))].append(one)
    elif kind == "replica":
        one.replica_id = 1
    elif kind == "move" and isinstance(one, ShardedTensor):
        one.axis_fragmentations, one.global_offset = None, tuple(n + 1 for n in one.global_offset)
    elif kind == "dtype" and isinstance(one, ShardedTensor):
        one.dtype = torch.int8


def entities_of_a_job(rng: random.Random) -> list[list[ShardedBase]]:
    """Grids, uneven cuts with empty parts, replicas, whole tensors and objects of a few ranks."""
    num_ranks = rng.randint(1, 5)
    ranks: list[list[ShardedBase]] = [[] for _ in range(num_ranks)]
    cuts = sorted(rng.randrange(8) for _ in range(num_ranks - 1))
    for rank in range(num_ranks):
        grid = ShardedTensor("grid", None, torch.float32, (2, 3), (2 * num_ranks, 3), (2 * rank, 0), (num_ranks, 1))
        start, stop = [0, *cuts][rank], [*cuts, 7][rank]
        uneven = ShardedTensor("uneven", None, torch.int64, (stop - start,), (7,), (start,), None)
        whole = ShardedTensor("whole", None, torch.bool, (3,), (3,), (0,), (1,), replica_id=(0, rank))
        layer = ShardedTensor("layers", None, torch.float32, (4,), (num_ranks, 4), (rank, 0), (num_ranks, 1), 0, 1)
        element = ShardedObject("rng", None, (num_ranks,), (rank,))
        single = ShardedObject("single", None, (1,), (0,), replica_id=rank)
        ranks[rank] += [grid, uneven, whole, layer, element, single]
    return ranks


def check_slowly(global_metadata: list[list[ShardedBase]]) -> None:
    """The same check, of one entity after the other."""
    tensors: dict[str, list[tuple[int, ShardedTensor]]] = {}
    objects: dict[str, list[tuple[int, ShardedObject]]] = {}
    for rank, entities in enumerate(global_metadata):
        for entity in entities:
            if isinstance(entity, ShardedTensor):
                tensors.setdefault(entity.key, []).append((rank, entity))
            elif isinstance(entity, ShardedObject):
                objects.setdefault(entity.key, []).append((rank, entity))
    problems = [f"{key!r} names both a tensor and an object" for key in tensors.keys() & objects.keys()]
    problems += filter(None, (tensor_problem(key, shards) for key, shards in tensors.items()))
    problems += filter(None, (object_problem(key, elements) for key, elements in objects.items()))
    raise_problems(problems)


@given(seed=st.integers(0, 100_000), num_faults=st.integers(0, 2))
def test_what_is_found_is_what_the_slow_check_finds(seed: int, num_faults: int) -> None:
    rng = random.Random(seed)
    entities = entities_of_a_job(rng)
    for _ in range(num_faults):
        spoil(entities, rng)
    outlines = [outline_of(of_rank) for of_rank in entities]
    shared = {str(one.form): one.form for one in outlines}
    outlines = [Outline(shared[str(one.form)], one.numbers) for one in outlines]
    try:
        check_slowly(entities)
    except CheckpointMismatchError as raised:
        expected = str(raised)
        with pytest.raises(CheckpointMismatchError) as caught:
            check_outlines(outlines)
        assert sorted(str(caught.value).split(": ")[2:3]) == sorted(expected.split(": ")[2:3])
    else:
        check_outlines(outlines)


def test_a_hole_among_many_ranks_is_named_with_its_box() -> None:
    form = outline_of([ShardedTensor("w", None, torch.float32, (2,), (400,), (0,), (200,))]).form
    outlines = [Outline(form, [2 * rank, int(rank != 7)]) for rank in range(200)]
    with pytest.raises(CheckpointMismatchError, match=r"'w'.*no holder has box \[14:16\]"):
        check_outlines(outlines)


def test_only_sharded_entities_have_an_outline() -> None:
    with pytest.raises(CheckpointMismatchError, match="apply factories first"):
        outline_of([ShardedTensorFactory("w", None, lambda *_: {}, lambda built: built)])
