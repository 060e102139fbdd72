"""Tensors of devices between meshes: every taker ends with the bits that the givers had, whatever they are of."""

from __future__ import annotations

import pytest
import torch

import remesh
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece, piece_of
from remesh.testbed.pool import RankPool
from tests.gpu.settings import ALONE, CPU, SHARED, TWO, Place, Setting, in_settings

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "bool"]
SHAPE = (12, 10)


def random_bits(dtype: str, seed: int) -> torch.Tensor:
    """The same on every rank, on the CPU; NaN and -0.0 may be among them."""
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == "bool" else 256
    bits = torch.randint(most, (SHAPE[0] * SHAPE[1] * kind.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(kind).view(SHAPE)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def rows_of(whole: torch.Tensor, place: Place) -> Piece:
    """This rank's rows, on its device."""
    first, stop = place.share_of(SHAPE[0])
    box = Box((first, 0), (stop, SHAPE[1]))
    return Piece(whole[box.slices()].contiguous().to(place.device), SHAPE, (Shard(0, box),))


def columns_of(whole: torch.Tensor, place: Place) -> Piece:
    """This rank's columns, on its device."""
    first, stop = place.share_of(SHAPE[1])
    box = Box((0, first), (SHAPE[0], stop))
    return Piece(whole[box.slices()].contiguous().to(place.device), SHAPE, (Shard(0, box),))


def reshard_rows_to_columns(place: Place, dtype: str, on_host: str) -> None:
    whole = random_bits(dtype, seed=1)
    give, take = rows_of(whole, place), columns_of(torch.zeros_like(whole), place)
    if on_host == "give":
        give = Piece(give.tensor.cpu(), give.global_shape, give.shards)
    if on_host == "take":
        take = Piece(take.tensor.cpu(), take.global_shape, take.shards)
    remesh.reshard({"w": give}, {"w": take}, group=place.group)
    assert torch.equal(bits_of(take.tensor), bits_of(columns_of(whole, place).tensor))
    assert torch.equal(bits_of(give.tensor), bits_of(rows_of(whole, place).tensor)), "what is given stays as it was"


@in_settings(CPU, SHARED, ALONE, TWO)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reshard_moves_bits(ranks: RankPool, setting: Setting, dtype: str) -> None:
    setting.run(ranks, reshard_rows_to_columns, dtype, "")


@in_settings(CPU, SHARED, ALONE, TWO)
@pytest.mark.parametrize("on_host", ["give", "take"])
def test_tensors_of_the_host_go_through_the_device_of_the_group(
    ranks: RankPool, setting: Setting, on_host: str
) -> None:
    setting.run(ranks, reshard_rows_to_columns, "bfloat16", on_host)


def reshard_what_lies_on_the_neighbours_device(place: Place) -> None:
    """The group talks for this rank's device; what lies elsewhere is staged there."""
    whole = random_bits("float32", seed=5)
    give, take = rows_of(whole, place), columns_of(torch.zeros_like(whole), place)
    there = torch.device("cuda", 1 - place.rank)
    take = Piece(take.tensor.to(there), take.global_shape, take.shards)
    remesh.reshard({"w": Piece(give.tensor.to(there), give.global_shape, give.shards)}, {"w": take}, group=place.group)
    assert torch.equal(bits_of(take.tensor), bits_of(columns_of(whole, place).tensor))


@in_settings(TWO)
def test_tensors_of_another_device_go_through_that_of_the_group(ranks: RankPool, setting: Setting) -> None:
    setting.run(ranks, reshard_what_lies_on_the_neighbours_device)


def give_what_kernels_are_still_making(place: Place) -> None:
    """What the current stream was given before the call is moved; what it is given after it, is not."""
    whole = torch.ones(SHAPE)
    give, take = rows_of(whole, place), columns_of(torch.zeros_like(whole), place)
    for _ in range(200):
        give.tensor.add_(1.0)
    remesh.reshard({"w": give}, {"w": take}, group=place.group)
    give.tensor.fill_(-1.0)
    assert take.tensor.eq(201.0).all()


@in_settings(CPU, SHARED, ALONE, TWO)
def test_a_reshard_is_in_order_with_the_current_stream(ranks: RankPool, setting: Setting) -> None:
    setting.run(ranks, give_what_kernels_are_still_making)


def read_behind_kernels(place: Place) -> None:
    """Readers leave while their work is queued, on streams of their own; two more versions come meanwhile."""
    refit = remesh.Refit({"w": columns_of(torch.zeros(SHAPE), place)}, group=place.group)
    seen = []
    for version in range(1, 7):
        refit.push({"w": rows_of(torch.full(SHAPE, float(version)), place)}, version)
        with place.own_stream(), refit.read() as weights:
            tensor = piece_of(weights.tensors["w"]).tensor
            busy = torch.ones(1 << 20, device=place.device)
            for _ in range(50):
                busy.mul_(1.0)
            seen.append((tensor.min() * busy[0], tensor.max() * busy[0]))
    place.settle()  # what is read below was made on streams of its own
    assert [(low.item(), high.item()) for low, high in seen] == [(v, v) for v in map(float, range(1, 7))]


@in_settings(CPU, SHARED, ALONE, TWO)
def test_readers_of_a_refit_may_leave_before_their_kernels_are_through(ranks: RankPool, setting: Setting) -> None:
    setting.run(ranks, read_behind_kernels)


def push_two_versions(place: Place) -> list[float]:
    take = columns_of(torch.zeros(SHAPE), place)
    refit = remesh.Refit({"w": take}, group=place.group)
    seen = []
    for version in (1, 2):
        refit.start({"w": rows_of(torch.full(SHAPE, float(version)), place)}, version).result()
        with refit.read() as weights:
            tensor = piece_of(weights.tensors["w"]).tensor
            assert tensor.device == place.device
            seen.append(tensor.mean().item())
    return seen


@in_settings(CPU, SHARED, ALONE, TWO)
def test_a_refit_shows_one_version_after_the_other(ranks: RankPool, setting: Setting) -> None:
    assert setting.run(ranks, push_two_versions) == [[1.0, 2.0]] * setting.world_size
