"""The state of devices in files and in memory: the values of the call, in every dtype, and back onto the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.elasticity.snapshots.choice import SnapshotChoice
from remesh.elasticity.snapshots.opened import read_snapshot
from remesh.elasticity.snapshots.snapshot_keeper import SnapshotKeeper
from remesh.elasticity.snapshots.snapshot_memory import SnapshotBuffer
from remesh.elasticity.snapshots.taker import Shelf, SnapshotTaker
from remesh.elasticity.training.offers import Offers
from remesh.elasticity.training_state import HeldState
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece, piece_of
from remesh.testbed.pool import RankPool
from remesh.testbed.quiet_limit import QuietLimit
from remesh.wire.token import Token
from tests.gpu.settings import ALONE, CPU, SHARED, TWO, Place, Setting, in_settings
from tests.gpu.test_moves import DTYPES, bits_of, columns_of, random_bits, rows_of

LARGE = 1 << 20


def state_at(place: Place) -> dict[str, Any]:
    """Tensors that all hold, one of which each holds rows, one that is not contiguous, and one that is large."""
    state: dict[str, Any] = {dtype: random_bits(dtype, seed=2).to(place.device) for dtype in DTYPES}
    state["rows"] = rows_of(random_bits("float32", seed=3), place)
    state["turned"] = torch.arange(12.0, device=place.device).view(3, 4).t()
    state["large"] = torch.full((LARGE,), 7.0, device=place.device)
    return state


def tensor_of(value: Any) -> torch.Tensor:
    return piece_of(value).tensor


def save_change_and_load(place: Place, folder: Path, background: bool) -> None:
    state, expected = state_at(place), state_at(place)
    for number in range(3):
        saved = remesh.save(state, folder / str(number), group=place.group, background=background)
        for value in state.values():  # queued right behind the save, in place, and all of it
            tensor_of(value).zero_()
        state = state_at(place)
        saved.result()
    found = state_at(place)
    for value in found.values():
        tensor_of(value).zero_()
    remesh.load(found, folder / "1", group=place.group)
    for name, value in expected.items():
        assert tensor_of(found[name]).device == place.device
        assert torch.equal(bits_of(tensor_of(found[name])), bits_of(tensor_of(value))), name


@in_settings(CPU, SHARED, ALONE, TWO)
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_save_has_the_values_of_its_call(ranks: RankPool, setting: Setting, tmp_path: Path, background: bool) -> None:
    setting.run(ranks, save_change_and_load, tmp_path, background)


def load_in_another_layout(place: Place, folder: Path, dtype: str) -> None:
    whole = random_bits(dtype, seed=4)
    remesh.save({"w": rows_of(whole, place)}, folder, group=place.group)
    take = columns_of(torch.zeros_like(whole), place)
    remesh.load({"w": take}, folder, group=place.group)
    assert torch.equal(bits_of(take.tensor), bits_of(columns_of(whole, place).tensor))


@in_settings(CPU, SHARED, ALONE, TWO)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_checkpoint_loads_onto_devices_in_another_layout(
    ranks: RankPool, setting: Setting, tmp_path: Path, dtype: str
) -> None:
    setting.run(ranks, load_in_another_layout, tmp_path, dtype)


def load_behind_kernels(place: Place, folder: Path) -> None:
    """On a stream of the program's own, with work that is still under way when threads read from files."""
    whole = torch.arange(float(LARGE))
    remesh.save({"w": whole.to(place.device)}, folder, group=place.group)
    with place.own_stream():
        take = torch.zeros(LARGE, device=place.device)
        for _ in range(200):
            take.add_(1.0)
        remesh.load({"w": take}, folder, group=place.group)
        take.mul_(2.0)
        found = take.cpu()
    assert torch.equal(found, 2 * whole)


@in_settings(CPU, SHARED, ALONE, TWO)
def test_a_load_is_in_order_with_the_current_stream(ranks: RankPool, setting: Setting, tmp_path: Path) -> None:
    setting.run(ranks, load_behind_kernels, tmp_path)


def join_host_and_device(place: Place) -> None:
    """A survivor has half of a tensor on its device, and on the host what a lost rank had of it."""
    whole = random_bits("float32", seed=6)
    half = len(whole) // 2
    shape = tuple(whole.shape)
    lower, upper = Box((0, 0), (half, shape[1])), Box((half, 0), shape)
    own = Piece(whole[lower.slices()].to(place.device), shape, (Shard(0, lower),))
    lost = Piece(whole[upper.slices()].clone(), shape, (Shard(0, upper),))
    held, snapshot = HeldState(5, 50, {"w": own}, {}), HeldState(5, 50, {"w": lost}, {})
    give = Offers(held, (snapshot,)).at(held.moment)
    assert give["w"].tensor.device == place.device
    take = columns_of(torch.zeros_like(whole), place)
    remesh.reshard(give, {"w": take}, group=place.group)
    assert torch.equal(bits_of(take.tensor), bits_of(columns_of(whole, place).tensor))


@in_settings(CPU, SHARED, ALONE, TWO)
def test_a_snapshot_on_the_host_joins_what_lies_on_the_device(ranks: RankPool, setting: Setting) -> None:
    setting.run(ranks, join_host_and_device)


def snap_and_change(place: Place) -> None:
    """Three in a row, each changed right behind it; the neighbour ends with the last two."""
    told: list[dict[str, Any]] = []
    token = Token("job", b"0123456789abcdef")
    weight = torch.zeros(LARGE, device=place.device)
    with SnapshotKeeper("127.0.0.1", token) as keeper:
        shelf = Shelf(1, 0, ("127.0.0.1", keeper.port), token)
        taker = SnapshotTaker(shelf, told.append, lambda kind, **more: told.append({"kind": kind, **more}))
        for step in (1, 2, 3):
            weight.fill_(float(step))
            held = HeldState(step, step, {"w": piece_of(weight)}, {})
            taker.take(held, SnapshotChoice({"w": frozenset(s.box for s in piece_of(weight).shards)}, ""), os.getpid())
            weight.fill_(-1.0)
            limit = QuietLimit(lambda: len(told), 60.0)
            while taker.is_busy:
                assert not limit.is_over(), told
        kept = [read_snapshot(SnapshotBuffer.open(path)) for path in keeper.paths()[1, 0]]
        found = {(held.step, held.pieces["w"].tensor.unique().item()) for held in kept if held is not None}
        assert found == {(2, 2.0), (3, 3.0)}
        taker.close()


@in_settings(CPU, SHARED)
def test_a_neighbour_keeps_the_values_of_the_step(ranks: RankPool, setting: Setting) -> None:
    setting.run(ranks, snap_and_change)
