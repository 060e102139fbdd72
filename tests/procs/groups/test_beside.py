"""Groups beside the default one: ranks of their own numbers, members that come and go, and whoever stays away."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import remesh
from remesh.comm.gather import all_gather_json
from remesh.foundation.errors import PeerError, PlanError
from remesh.groups.beside import join_beside, leave_beside
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece
from remesh.testbed.pool import RankPool
from remesh.wire.free_ports import free_port


def _join(port: int, rank: int, size: int, timeout_s: float = 30.0) -> dist.ProcessGroup:
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    return join_beside(store, rank, size, timeout_s=timeout_s)


def _move_as_members_come_and_go(ports: list[int]) -> list[list[float]]:
    """Every group has fewer members than the one before, and counts them the other way round."""
    last, found = dist.get_world_size() - 1, []
    for leaving, port in enumerate(ports):
        rank, size = last - dist.get_rank(), dist.get_world_size() - leaving
        if rank >= size:
            continue
        group = _join(port, rank, size)
        assert all_gather_json([rank, dist.get_rank()], group) == [[each, last - each] for each in range(size)]
        mine = Piece(torch.full((2,), float(rank)), (2 * size,), (Shard(0, Box.at((2 * rank,), (2,))),))
        whole = torch.zeros(2 * size)
        remesh.reshard({"x": mine}, {"x": whole}, group=group)
        with pytest.raises(PlanError) as raised:
            remesh.reshard({}, {"y": whole}, group=group)
        assert len(set(all_gather_json(str(raised.value), group))) == 1
        leave_beside(group)
        found.append(whole[::2].tolist())
    dist.barrier()
    return found


def test_tensors_move_in_groups_of_own_numbers_as_members_leave(ranks: RankPool) -> None:
    told = ranks.run(_move_as_members_come_and_go, 4, ([free_port() for _ in range(3)],))
    every = [[float(rank) for rank in range(size)] for size in (4, 3, 2)]
    assert told == [every[:1], every[:2], every, every]


def _meet_nobody(port: int) -> str:
    with pytest.raises(PeerError) as raised:
        _join(port, 0, 3, timeout_s=1.0)
    return str(raised.value)


def test_who_stays_away_is_waited_for_no_longer_than_was_said(ranks: RankPool) -> None:
    (told,) = ranks.run(_meet_nobody, 1, (free_port(),))
    assert "not all ranks called this within 1 s" in told
