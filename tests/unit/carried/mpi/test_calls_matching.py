"""What is asked of the queues of messages and receives besides matching, which is the engine's."""

from __future__ import annotations

from hypothesis import given, strategies as st

from remesh.carried.mpi.calls.table import ANY
from remesh.carried.mpi.lower.matching import Matching
from remesh.carried.mpi.lower.records import Arrived, Posted
from tests.unit.carried.mpi.oracles import DumbMatching

_MESSAGES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2)), max_size=12)


@given(_MESSAGES, st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 2), st.integers(-1, 2)), max_size=12))
def test_a_probe_finds_and_takes_the_earliest_that_fits(
    messages: list[tuple[int, int, int]], probes: list[tuple[int, int, int]]
) -> None:
    """Equal ones, too, are told apart."""
    matching, oracle = Matching(), DumbMatching()
    arrived = [Arrived(*message, 0, b"", number) for number, message in enumerate(messages)]
    matching.fill([], arrived)
    oracle.arrived = list(arrived)
    for probe in probes:
        expected = oracle.post(Posted(0, *probe))
        assert matching.find(*probe) is expected
        assert matching.take(*probe) is expected
    assert {message.sender_request for message in matching.arrived} == {
        message.sender_request for message in oracle.arrived
    }


def test_a_receive_that_is_taken_back_is_gone() -> None:
    matching = Matching()
    matching.fill([Posted(1, 0, ANY, ANY), Posted(2, 0, ANY, ANY)], [])
    assert matching.withdraw(1) and not matching.withdraw(1)
    assert [receive.request for receive in matching.posted] == [2]
