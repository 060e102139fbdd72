"""Shared memory of one name stays on the hosts that it was on."""

from __future__ import annotations

import pytest

from remesh.carried.hosts.apart import check_apart
from remesh.carried.hosts.host_list import assign_slots, parse_hosts
from remesh.foundation.errors import ConfigError

_RANKS = {
    "rank-0000": {"shared_names": ["/dev/shm/psm_1", "/dev/shm/cache"]},
    "rank-0001": {},
    "rank-0002": {"shared_names": ["/dev/shm/cache"]},
}


@pytest.mark.parametrize("hosts", ["a:2,b:1", "a:1,b:2", "a,b,c"])
def test_ranks_whose_memory_has_one_name_may_be_on_two_hosts(hosts: str) -> None:
    check_apart(_RANKS, assign_slots(parse_hosts(hosts, 3)), "restarting")


def test_on_one_host_they_are_refused_by_the_name() -> None:
    said = r"restarting: ranks 0 and 2 have .* by the name /dev/shm/cache, and would be on host a; put them on two"
    with pytest.raises(ConfigError, match=said):
        check_apart(_RANKS, assign_slots(parse_hosts("a:3", 3)), "restarting")
