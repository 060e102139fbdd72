"""Hosts as a user names them, and who is where."""

from __future__ import annotations

import pytest

from remesh.errors import ConfigError
from remesh.ranks.hosts import parse_hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a:x", "a:1,b:1", "a:9", "a,b,c,d,e"])
def test_hosts_without_a_name_or_with_another_number_of_ranks_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="reading hosts"):
        parse_hosts(text, 4)


def test_hosts_share_what_is_left_evenly() -> None:
    assert [host.num_ranks for host in parse_hosts("a,b,c", 8)] == [3, 3, 2]
