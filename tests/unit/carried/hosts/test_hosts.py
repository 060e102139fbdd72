"""Hosts as a user names them, and who is where."""

from __future__ import annotations

import pytest

from remesh.carried.hosts.host_list import assign_slots, count_ranks, describe_hosts, parse_hosts
from remesh.foundation.errors import ConfigError


@pytest.mark.parametrize("text", ["", "a,,b", "a:x", "a:1,b:1", "a:9", "a,b,c,d,e", "a:0,b", "a:-1,b:5"])
def test_hosts_without_a_name_or_with_another_number_of_ranks_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="reading hosts"):
        parse_hosts(text, 4)


def test_hosts_share_what_is_left_evenly() -> None:
    assert [host.num_ranks for host in parse_hosts("a,b,c", 8)] == [3, 3, 2]


def test_hosts_that_were_read_are_told_as_they_were_written() -> None:
    assert describe_hosts(parse_hosts("a:3,node-2:1", 4)) == "a:3,node-2:1"
    assert parse_hosts(describe_hosts(parse_hosts("a,b,c", 8)), 8) == parse_hosts("a,b,c", 8)


def test_every_rank_has_a_seat_and_every_seat_of_a_host_is_taken_once() -> None:
    slots = assign_slots(parse_hosts("a:2,b:1,c:3", 6))
    assert [slot.rank for slot in slots] == list(range(6))
    assert [(slot.host, slot.host_index, slot.local_rank, slot.num_local) for slot in slots] == [
        *(("a", 0, 0, 2), ("a", 0, 1, 2), ("b", 1, 0, 1)),
        *(("c", 2, 0, 3), ("c", 2, 1, 3), ("c", 2, 2, 3)),
    ]


@pytest.mark.parametrize(("text", "per_host", "count"), [("a,b", 2, 4), ("a:3,b", 2, 5), ("a:1,b:1", 9, 2)])
def test_hosts_without_a_number_have_as_many_ranks_as_all_have(text: str, per_host: int, count: int) -> None:
    assert count_ranks(text, per_host) == count
    assert len(assign_slots(parse_hosts(text, count))) == count
