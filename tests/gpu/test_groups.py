"""Groups over the device's own network: shed in a hang and after a death, and grown again by those who are left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from remesh.groups.lower import LowerHalf
from remesh.testbed.pool import DIED, RankPool
from tests.gpu.settings import ALONE, CPU, TWO, Place, Setting, in_settings, skip_without

TIMEOUT_S = 60.0


def grow(setting: Setting, place: Place, folder: Path, generation: int, num_ranks: int) -> LowerHalf:
    """Groups of the first so many ranks, which the pool's own group has given way to."""
    if dist.is_initialized():
        dist.destroy_process_group()
    lower = LowerHalf(setting.backend, setting.device_type, TIMEOUT_S)
    lower.grow(dist.FileStore(str(folder / str(generation))), place.rank, {"dp": num_ranks})
    return lower


def sum_of_ones(place: Place) -> float:
    ones = torch.ones(4, device=place.device)
    dist.all_reduce(ones)
    return ones.sum().item()


def hang_and_grow_again(place: Place, setting: Setting, folder: Path) -> None:
    """The last rank never comes to a collective, and another thread of everybody else severs."""
    for generation in (1, 2, 3):
        lower = grow(setting, place, folder, generation, place.world_size)
        assert sum_of_ones(place) == 4 * place.world_size
        if place.rank < place.world_size - 1:
            threading.Timer(0.3, lower.sever).start()
            with contextlib.suppress(RuntimeError):
                sum_of_ones(place)
        lower.shed()


@in_settings(CPU, ALONE, TWO)
def test_a_hang_in_a_collective_is_severed_and_groups_grow_again(
    ranks: RankPool, setting: Setting, tmp_path: Path
) -> None:
    setting.run(ranks, hang_and_grow_again, setting, tmp_path, timeout_s=3 * TIMEOUT_S)


def lose_one_and_go_on(place: Place, setting: Setting, folder: Path) -> float:
    lower = grow(setting, place, folder, 1, place.world_size)
    sum_of_ones(place)
    if place.rank == place.world_size - 1:
        while len([*folder.glob("* has its sum")]) < place.rank:  # the first one is for all
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"rank {place.rank} has its sum").touch()
    threading.Timer(0.3, lower.sever).start()
    with contextlib.suppress(RuntimeError):
        sum_of_ones(place)
    lower.shed()
    lower = grow(setting, place, folder, 2, place.world_size - 1)
    total = sum_of_ones(place)
    lower.shed()
    return total


@in_settings(CPU, TWO)
def test_survivors_of_a_death_go_on_without_the_lost_rank(ranks: RankPool, setting: Setting, tmp_path: Path) -> None:
    last = setting.world_size - 1
    found = setting.run(ranks, lose_one_and_go_on, setting, tmp_path, dying=[last], timeout_s=3 * TIMEOUT_S)
    assert found == [4.0 * last] * last + [DIED]


@pytest.mark.gpu
def test_peers_reach_each_others_memory() -> None:
    """Not needed, but what is measured between two devices depends on it: told by name."""
    skip_without(2)
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("device 0 cannot reach the memory of device 1: NCCL goes through the host")
    torch.zeros(1, device="cuda:0").to("cuda:1")
