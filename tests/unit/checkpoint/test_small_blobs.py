"""Small tensors that are read together are those that are read alone, and tell their damage by name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats import small_blobs
from remesh.checkpoint.run import reader
from remesh.checkpoint.run.reader import open_checkpoint, plan_fill
from remesh.dist_checkpointing import ShardedTensor
from remesh.layout import Box

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64]


def many(num_tensors: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Runs of alike tensors, alternating ones, scalars, empty ones and some that are not small."""
    chance = random.Random(seed)
    shapes = [(chance.randrange(1, 40), chance.randrange(1, 40)) for _ in range(4)] + [(), (0, 3), (3,), (200, 90)]
    state, shape = {}, shapes[0]
    for number in range(num_tensors):
        if chance.random() < 0.4:
            shape = chance.choice(shapes)
        state[f"t{number}"] = torch.randn(shape).mul(100).to(chance.choice(DTYPES[: 1 + number % len(DTYPES)]))
    return state


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("window_bytes", [1, 20_000, 4 << 20])
def test_every_tensor_arrives_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    state = many(300)
    remesh.save(state, tmp_path)
    monkeypatch.setattr(small_blobs, "WINDOW_BYTES", window_bytes)
    names = list(state)
    random.Random(1).shuffle(names)
    loaded = remesh.load({name: torch.zeros_like(state[name]) for name in names}, tmp_path)
    assert all(same(loaded[name], tensor) for name, tensor in state.items())


def test_places_of_any_dtype_and_strides_are_filled(tmp_path: Path) -> None:
    values = torch.randn(9, 5)
    remesh.save(dict.fromkeys("abcde", values), tmp_path)
    with torch.inference_mode():
        for_inference = torch.zeros(9, 5)
    parameter = torch.nn.Parameter(torch.zeros(9, 5))
    places = {
        "a": torch.zeros(9, 5, dtype=torch.float64),
        "b": torch.zeros(5, 9).t(),
        "c": parameter,
        "d": torch.zeros(9, 10)[:, ::2],
        "e": for_inference,
    }
    loaded = remesh.load(dict(places), tmp_path)
    assert all(loaded[name] is place and torch.equal(place.float(), values) for name, place in places.items())
    assert parameter.is_leaf and parameter.requires_grad


def test_sharded_tensors_take_the_same_way(tmp_path: Path) -> None:
    state = many(60)
    wholes = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in state.items()}
    halves = {f"half{at}": ShardedTensor.from_rank_offsets("half", torch.ones(4) * at, (0, at, 2)) for at in range(2)}
    dist_checkpointing.save({**wholes, **halves}, tmp_path)
    places = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    wanted = {name: ShardedTensor.from_rank_offsets(name, place) for name, place in places.items()}
    fill = plan_fill(open_checkpoint(tmp_path), list(wanted.values()))
    assert sum(map(len, fill.small.values())) > 40
    loaded = dist_checkpointing.load(
        {**wanted, "half": ShardedTensor.from_rank_offsets("half", torch.zeros(8))}, tmp_path
    )
    assert isinstance(loaded, dict)
    assert all(same(loaded[name], tensor) for name, tensor in state.items())
    assert loaded["half"].tolist() == [0.0] * 4 + [1.0] * 4


def test_damage_names_the_tensor_among_many(tmp_path: Path) -> None:
    state = {f"t{number}": torch.randn(30, 70) for number in range(50)}
    remesh.save(state, tmp_path)
    extent = open_checkpoint(tmp_path).manifest.tensors["t31"].chunks[0].extent
    data = tmp_path / extent.file
    content = bytearray(data.read_bytes())
    content[extent.file_start + 4200] ^= 1  # a block that no other tensor has a part of
    data.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="tensor 't31' .*__0_0.distcp") as caught:
        remesh.load({name: torch.zeros(30, 70) for name in state}, tmp_path)
    assert caught.value.reason == "checksum"
    rest = {name: torch.zeros(30, 70) for name in state if name not in ("t30", "t31", "t32")}
    assert all(torch.equal(tensor, state[name]) for name, tensor in remesh.load(rest, tmp_path).items())


def test_one_name_may_be_wanted_twice(tmp_path: Path) -> None:
    remesh.save({"w": torch.arange(5)}, tmp_path)
    places = [torch.zeros(5), torch.zeros(5, dtype=torch.int64)]
    wanted = [ShardedTensor.from_rank_offsets("w", place) for place in places]
    checkpoint = open_checkpoint(tmp_path)
    reader.fill_tensors(checkpoint, plan_fill(checkpoint, wanted))
    assert [place.tolist() for place in places] == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_columns_are_read_without_what_lies_between(tmp_path: Path, dtype: torch.dtype) -> None:
    w = torch.randn(64, 3, 4096 * 8 // dtype.itemsize).mul(9).to(dtype)
    remesh.save({"before": torch.ones(3), "w": w}, tmp_path)
    size = w.shape[-1] // 8
    for start in ((0, 0, 3 * size), (1, 1, 7), (5, 0, 7 * size)):
        box = Box.at(start, (40, 2, size))
        place = torch.zeros(box.shape, dtype=dtype)
        part = ShardedTensor("w", place, dtype, box.shape, tuple(w.shape), box.start, None)
        checkpoint = open_checkpoint(tmp_path)
        num_read = reader.fill_tensors(checkpoint, plan_fill(checkpoint, [part]))
        assert torch.equal(place, w[box.slices()])
        assert num_read <= 2 * place.nbytes + (8 << 10)
