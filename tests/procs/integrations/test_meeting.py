"""A store is the one of before while it answers, and whoever serves at its place when it does not."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from remesh.integrations.store_meeting import store_at
from remesh.wire.free_ports import free_port


@pytest.mark.procs
def test_a_store_that_has_gone_is_given_up_for_the_next_one_at_its_place() -> None:
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    first = store_at("127.0.0.1", port, is_server=False)
    first.add("meetings", 1)
    assert store_at("127.0.0.1", port, is_server=False) is first
    del server  # as the host of a trainer that has died
    again = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    found = store_at("127.0.0.1", port, is_server=False)
    assert found is not first and found.add("meetings", 1) == 1
    assert again.add("meetings", 1) == 2
