"""Interfaces as the kernel tells them, and as a user names them."""

from __future__ import annotations

import pytest

from remesh.carried.hosts.host_list import assign_slots, parse_hosts
from remesh.carried.hosts.interfaces import choose_interface, find_interface
from remesh.foundation.errors import ConfigError

_TWO = parse_hosts("a:1,127.0.0.1:1", 2)


def test_on_one_host_ranks_speak_over_the_loopback() -> None:
    one = parse_hosts("a:3", 3)
    assert {choose_interface("", one, slot) for slot in assign_slots(one)} == {"lo"}


def test_on_several_it_is_the_one_that_leads_to_another() -> None:
    assert choose_interface("", _TWO, assign_slots(_TWO)[0]) == "lo"
    assert find_interface("127.0.0.9") == "lo"


def test_one_that_a_host_lacks_is_refused_with_those_it_has() -> None:
    slot = assign_slots(_TWO)[1]
    assert choose_interface("lo,lo", _TWO, slot) == "lo,lo"
    with pytest.raises(ConfigError, match=r"rank 1: host 127.0.0.1 has no no-such0, expected one of lo"):
        choose_interface("lo,no-such0", _TWO, slot)


def test_a_host_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match=r"leads to no\.such\.host\.invalid.*--interface"):
        find_interface("no.such.host.invalid")
