"""Where state comes from when a spare takes a seat: what it has at hand, and what it has to be given."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from remesh.elastic.state import CarriedState, Held
from remesh.elastic.training.fill import Filled, Offers, fill_state
from remesh.layout.from_torch import piece_of
from remesh.testing.pool import RankPool

pytestmark = pytest.mark.procs
HOSTS = {0: "a", 1: "b", 2: "c"}
SIZE = 30


def held(step: int, tensor: torch.Tensor) -> Held:
    return Held(step, 10 * step, {"w": piece_of(tensor)}, {})


def fill_from_replicas() -> tuple[Filled, float]:
    """Ranks 0 and 1 hold step 12; the spare on rank 2 has a whole snapshot of step 10."""
    old, new = torch.full((SIZE,), 10.0), torch.full((SIZE,), 12.0)
    wanted = torch.zeros(SIZE)
    offers = Offers(None, (held(10, old),)) if dist.get_rank() == 2 else Offers(held(12, new), (held(10, old),))
    filled = fill_state(CarriedState({"w": wanted}), offers, host_of=HOSTS, checkpoint=None)
    return filled, float(wanted.sum())


def fill_from_shelves() -> tuple[Filled, float]:
    """A third of the state died. Every rank has its own seat's snapshot, the spare on rank 2 that of the dead."""
    mesh = init_device_mesh("cpu", (3,))
    old, new = (
        distribute_tensor(torch.full((SIZE,), step), mesh, [Shard(0)], src_data_rank=None) for step in (10.0, 12.0)
    )
    wanted: DTensor = distribute_tensor(torch.zeros(SIZE), mesh, [Shard(0)], src_data_rank=None)
    offers = Offers(held(12, new) if dist.get_rank() < 2 else None, (held(10, old),))
    filled = fill_state(CarriedState({"w": wanted}), offers, host_of=HOSTS, checkpoint=None)
    return filled, float(wanted.to_local().sum())


def test_survivors_newer_replicas_come_before_what_a_spare_has_at_hand(ranks: RankPool) -> None:
    for filled, total in ranks.run(fill_from_replicas, 3):
        assert (filled.source, filled.position.step) == ("peers", 12)
        assert {taker for _, taker in filled.bytes_by_pair} == {2}
        assert sum(filled.bytes_by_pair.values()) == 4 * SIZE
        assert total == 12.0 * SIZE


def test_going_back_moves_nothing_when_everybody_has_its_own_seats_snapshot(ranks: RankPool) -> None:
    for filled, total in ranks.run(fill_from_shelves, 3):
        assert (filled.source, filled.position.step) == ("snapshots", 10)
        assert filled.bytes_by_pair == {}
        assert filled.bytes_kept == 4 * SIZE
        assert total == 10.0 * SIZE / 3
