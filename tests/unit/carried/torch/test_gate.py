"""What passes a gate, and what is held."""

from __future__ import annotations

import threading

import pytest

from remesh.carried.torch.gate import Entrant, Gate, Tally
from remesh.foundation.errors import ConfigError

_PATIENCE_S = 20.0


def _in_thread(call) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def _tally(gate: Gate, key: str) -> Tally:
    return gate.tallies.get(key) or gate.add_tally(key)


def _enter(gate: Gate, key: str) -> Entrant:
    entrant = Entrant()
    gate.enter(_tally(gate, key), entrant)
    return entrant


def _entered(gate: Gate) -> dict[str, int]:
    return {key: tally.entered for key, tally in gate.tallies.items()}


def _wait_until_held(gate: Gate, keys: list[str]) -> None:
    with gate.changed:
        while gate.held_keys() != keys:
            gate.changed.wait(0.001)


def test_collectives_are_counted_by_key() -> None:
    gate = Gate()
    assert [_enter(gate, key).number for key in ("a", "b", "a")] == [1, 1, 2]
    assert _entered(gate) == {"a": 2, "b": 1}


def test_what_has_been_entered_is_under_way_in_its_order_until_it_ends() -> None:
    gate = Gate()
    first, second, third = (_enter(gate, "a") for _ in range(3))
    gate.leave(_tally(gate, "a"), second, was_begun=True)
    assert list(_tally(gate, "a").under_way) == [first, third]


def test_a_collective_that_the_library_refused_is_not_counted() -> None:
    gate = Gate()
    refused = _enter(gate, "a")
    gate.leave(_tally(gate, "a"), refused, was_begun=False)
    assert _tally(gate, "a") == Tally("a")


def test_none_is_lost_when_two_threads_enter_and_the_library_refuses_the_first() -> None:
    gate = Gate()
    refused, second = _enter(gate, "a"), _enter(gate, "a")
    gate.leave(_tally(gate, "a"), refused, was_begun=False)
    third = _enter(gate, "a")
    assert list(_tally(gate, "a").under_way) == [second, third]


def test_a_gate_that_holds_lets_collectives_up_to_their_targets() -> None:
    gate = Gate()
    _enter(gate, "a")
    gate.hold({"a": 2})
    _enter(gate, "a")
    thread = _in_thread(lambda: _enter(gate, "a"))
    _wait_until_held(gate, ["a"])
    assert _entered(gate) == {"a": 2}
    gate.hold({"a": 3})
    thread.join(_PATIENCE_S)
    assert _entered(gate) == {"a": 3}


def test_who_is_held_is_told_at_once_after_each_question() -> None:
    gate = Gate()
    gate.hold({})
    thread = _in_thread(lambda: _enter(gate, "a"))
    _wait_until_held(gate, ["a"])
    gate.hold({})
    with gate.changed:
        assert gate.held_keys() == ["a"]
    gate.open()
    thread.join(_PATIENCE_S)


def test_a_key_without_a_target_is_held_where_it_is() -> None:
    gate = Gate()
    gate.hold({})
    thread = _in_thread(lambda: _enter(gate, "new"))
    _wait_until_held(gate, ["new"])
    assert _entered(gate) == {"new": 0}
    gate.open()
    thread.join(_PATIENCE_S)
    assert _entered(gate) == {"new": 1}


def test_messages_pass_a_gate_that_holds_and_not_one_that_is_closed() -> None:
    gate = Gate()
    gate.hold({})
    gate.begin_passing()
    gate.close()
    assert gate.num_passing == 1
    gate.end_passing()
    thread = _in_thread(gate.begin_passing)
    thread.join(0.05)
    assert thread.is_alive()
    assert gate.num_passing == 0
    gate.open()
    thread.join(_PATIENCE_S)
    assert gate.num_passing == 1


def test_a_gate_is_closed_only_after_the_waves_of_a_clock() -> None:
    with pytest.raises(ConfigError, match="the waves of a clock come first"):
        Gate().close()
