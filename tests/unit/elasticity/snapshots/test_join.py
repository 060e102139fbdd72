"""What several holders on one node give of one tensor becomes one piece."""

from __future__ import annotations

import torch

from remesh.elasticity.training.fill import Offers
from remesh.elasticity.training_state import HeldState, Moment
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece, join_pieces


def piece(start: int, stop: int) -> Piece:
    return Piece(torch.arange(start, stop), (8,), (Shard(0, Box((start,), (stop,))),))


def test_joined_piece_holds_every_box_with_its_values() -> None:
    joined = join_pieces([piece(4, 8), piece(0, 2), piece(4, 8)])
    assert [shard.box for shard in joined.shards] == [Box((4,), (8,)), Box((0,), (2,))]
    for shard in joined.shards:
        values = joined.tensor.flatten()[shard.offset : shard.offset + shard.box.shape[0]]
        assert values.tolist() == list(range(shard.box.start[0], shard.box.stop[0]))


def test_offers_of_a_step_are_those_of_memory_and_snapshots_together() -> None:
    offers = Offers(
        HeldState(7, 70, {"w": piece(0, 4)}, {}), (HeldState(5, 50, {"w": piece(4, 8)}, {}), HeldState(7, 70, {}, {}))
    )
    assert [shard.box for shard in offers.at(Moment(0, 7))["w"].shards] == [Box((0,), (4,))]
    assert [shard.box for shard in offers.at(Moment(0, 5))["w"].shards] == [Box((4,), (8,))]
    assert offers.at(Moment(0, 6)) == offers.at(Moment(1, 7)) == {}


def test_what_adds_no_box_is_not_copied() -> None:
    """As the snapshot that a rank has of its own state at the step that it is at."""
    own, snapshot = piece(0, 8), piece(0, 8)
    assert join_pieces([own, snapshot]) is own


def test_snapshots_on_the_host_join_what_lies_on_a_device() -> None:
    on_device = Piece(torch.empty(4, device="meta"), (8,), (Shard(0, Box((0,), (4,))),))
    joined = join_pieces([on_device, Piece(torch.ones(4), (8,), (Shard(0, Box((4,), (8,))),))])
    assert (joined.tensor.device, joined.tensor.numel()) == (on_device.tensor.device, 8)
