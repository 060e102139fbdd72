"""The benchmark of weight syncs runs, tiny: right bits in every engine, and shards move fewer bytes than broadcasts."""

from __future__ import annotations

import pytest

from benchmarks.integrations import sync

pytestmark = pytest.mark.netns


def test_a_sync_is_timed_beside_its_peer_and_moves_fewer_bytes() -> None:
    rows = {row.case.partition(": ")[2]: row for row in sync.rows(sync.Sizes(num_layers=1, repeat=1, vocabulary=64))}
    assert rows[sync.OURS].goal in (1.10, None) and rows[f"{sync.PEER} over {sync.OURS}"].peer == "gloo"
    for way in ("out of the busiest trainer's NIC", "into the busiest engine's NIC"):
        assert rows[f"bytes {way}, {sync.OURS}"].value < rows[f"bytes {way}, {sync.PEER}"].value
