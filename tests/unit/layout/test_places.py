"""Elements that share a place in a buffer are found, compared with listing every place."""

from __future__ import annotations

import random

import pytest
import torch

from remesh.foundation.errors import Error, LayoutError
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.layout.places import check_places, has_own_places
from remesh.resharding.reshard_api import reshard
from tests.profiles import seeds


def is_refused(shards: list[Shard], shape: tuple[int, ...]) -> bool:
    try:
        check_places(shards, shape, "testing")
    except LayoutError:
        return True
    return False


def oracle(shards: list[Shard]) -> bool:
    """Whether some place means two elements, by going through all of them."""
    meaning: dict[int, tuple[int, tuple[int, ...]]] = {}
    for shard in shards:
        assert shard.strides is not None
        seen = set()
        for index in _indices(shard.box):
            place = shard.offset + sum(
                (x - s) * n for x, s, n in zip(index, shard.box.start, shard.strides, strict=True)
            )
            if place in seen or meaning.setdefault(place, (shard.addend, index)) != (shard.addend, index):
                return True
            seen.add(place)
    return False


def _indices(box: Box) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for low, high in zip(box.start, box.stop, strict=True):
        found = [(*head, x) for head in found for x in range(low, high)]
    return found


def random_shards(chance: random.Random) -> tuple[list[Shard], tuple[int, ...]]:
    ndim = chance.randint(1, 3)
    shape = tuple(chance.randint(1, 6) for _ in range(ndim))
    local = tuple(chance.randint(1, 6) for _ in range(ndim))
    shards = []
    for _ in range(chance.randint(1, 4)):
        start = tuple(chance.randrange(size) for size in shape)
        stop = tuple(
            chance.randint(low + (chance.random() < 0.9), size) for low, size in zip(start, shape, strict=True)
        )
        strides = [1]
        for size in reversed(local[1:]):
            strides.insert(0, strides[0] * size)
        if chance.random() < 0.2:
            strides = [chance.randint(0, 9) for _ in strides]
        if chance.random() < 0.3:  # as it lies in one local copy of the whole
            offset = sum(at * stride for at, stride in zip(start, strides, strict=True))
        else:
            offset = chance.randrange(30)
        shards.append(Shard(0, Box(start, stop), offset, tuple(strides), chance.choice([0, 0, 0, 1])))
    return shards, shape


@pytest.mark.parametrize("seed", seeds(20, quick=8))
def test_shared_places_are_found_as_by_listing_them(seed: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(150):
        shards, shape = random_shards(chance)
        expected = oracle(shards)
        assert is_refused(shards, shape) == expected, shards
        refused += expected
    assert 0 < refused < 150


@pytest.mark.parametrize("seed", range(5))
def test_a_strided_array_is_judged_as_by_listing_its_places(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        shape = [chance.randint(1, 5) for _ in range(chance.randint(0, 4))]
        strides = [chance.randint(0, 12) for _ in shape]
        expected = not oracle([Shard(0, Box.of_shape(tuple(shape)), 0, tuple(strides))])
        assert has_own_places(tuple(shape), tuple(strides)) == expected


def test_large_memory_is_judged_without_looking_at_elements() -> None:
    whole = Box.of_shape((1 << 20, 1 << 20))
    columns = [Shard(0, box, n, (1 << 20, 1)) for n, box in enumerate(whole.split(1, 1 << 12))]
    assert not is_refused([Shard(0, whole)], whole.shape)
    assert is_refused(columns, whole.shape)
    apart = [Shard(0, box, box.start[1], (1 << 20, 1)) for box in whole.split(1, 1 << 12)]
    assert not is_refused(apart, whole.shape)


WHOLE = Box.of_shape((4, 2))
SHARED: list[tuple[str, torch.Tensor | Piece]] = [
    ("overlap in memory", torch.zeros(4, 1).expand(4, 2)),
    (
        "[0:2, 0:2] and [2:4, 0:2] overlap in memory",
        Piece(torch.zeros(8), (4, 2), tuple(Shard(0, box) for box in WHOLE.split(0, 2))),
    ),
    ("outside the global shape", Piece(torch.zeros(16), (4, 2), (Shard(0, Box((0, 0), (8, 2))),))),
]


@pytest.mark.parametrize(("told", "shared"), SHARED)
def test_such_memory_is_neither_given_nor_taken(told: str, shared: torch.Tensor | Piece) -> None:
    for give, take in (({"w": shared}, {"w": torch.zeros(4, 2)}), ({"w": torch.zeros(4, 2)}, {"w": shared})):
        with pytest.raises(Error) as caught:
            reshard(give, take)
        assert "'w'" in str(caught.value)
        assert told in str(caught.value)
