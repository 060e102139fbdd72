"""The index of many ranks at once is that of one box after the other."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, strategies as st

from remesh.checkpoint.plan.writes import Written, assemble_index


def written_by(rank: int, rows: list[Any], rng: random.Random, num_objects: int) -> Written:
    """A file with boxes at random offsets, some of them those of other ranks, and objects."""
    numbers: list[int] = [rng.randrange(99) for _ in range(2 * num_objects)]
    for _, _, _, global_shape in rows:
        numbers += [rng.randrange(3) for _ in global_shape] + [rng.randrange(10**12), rng.randrange(99)]
    return Written(f"__{rank}_0.distcp", [f"o/shard_{at}_3" for at in range(num_objects)], rows, [], numbers)


def dumb_index(files: list[Written]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every stored box by key and offset, with all places that it may have; objects by name."""
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for file in files:
        numbers = list(file.numbers)
        for name in file.objects:
            objects.setdefault(name, (file.file, numbers.pop(0), numbers.pop(0)))
        for key, dtype, box_shape, global_shape in file.tensors:
            offset = tuple(numbers.pop(0) for _ in global_shape)
            place = (file.file, numbers.pop(0), numbers.pop(0))
            _, _, boxes = tensors.setdefault(key, (dtype, tuple(global_shape), {}))
            boxes.setdefault(offset, []).append((offset, tuple(box_shape), place))
    return tensors, objects


@given(seed=st.integers(0, 10_000))
def test_the_index_has_every_box_once(seed: int) -> None:
    rng = random.Random(seed)
    forms = [
        [("w", "float32", (2, 3), (8, 9)), ("scalar", "int64", (), ())],
        [("w", "float32", (2, 3), (8, 9)), ("v", "int8", (1,), (3,)), ("w", "float32", (1, 3), (8, 9))],
        [],
    ]
    files = [written_by(rank, forms[rng.randrange(3)], rng, rng.randrange(2)) for rank in range(rng.randint(1, 6))]
    tensors, objects = dumb_index(files)
    index = assemble_index([one for file in files for one in Written.from_parts(file.parts())])
    shared = assemble_index(files)
    for found in (index, shared):
        assert found.objects == objects
        assert found.tensors.keys() == tensors.keys()
        for key, (dtype, shape, boxes) in tensors.items():
            tensor = found.tensors[key]
            assert (tensor.dtype, tensor.global_shape) == (dtype, shape)
            assert sorted(offset for offset, _, _ in tensor.chunks) == sorted(boxes)
            assert all(chunk in boxes[chunk[0]] for chunk in tensor.chunks)
