"""Probes on the engine in C: what they tell of the messages that no receive has, beside MPI's rule."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from remesh.carried.mpi.calls.table import ANY, PROBE_REPLY, CallFlag
from remesh.carried.mpi.lower.records import Arrived, Posted
from tests.profiles import NUM_COSTLY_EXAMPLES
from tests.unit.carried.mpi.oracles import DumbMatching
from tests.unit.carried.mpi.program_side import Port
from tests.unit.carried.mpi.test_calls_engine import _blocking, _Half

_NOTHING = (0, 0, 0, 0, 0, 0)


def _probe(half: _Half, slot: int, flags: int, source: int, tag: int) -> tuple[Any, ...]:
    assert Port(half.upper, slot).ask("probe", (flags, 7, source, tag)) == 0
    return PROBE_REPLY.unpack_from(half.upper.bodies[slot])


@given(
    st.lists(
        st.tuples(st.sampled_from(["post", "arrive", "probe"]), st.integers(-1, 1), st.integers(-1, 2)), max_size=25
    )
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=NUM_COSTLY_EXAMPLES
)
def test_a_probe_tells_of_the_message_that_a_receive_would_take_and_leaves_it(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, int]]
) -> None:
    half, oracle = _Half(str(tmp_path_factory.mktemp("engine") / "channel")), DumbMatching()
    for index, (kind, source, tag) in enumerate(events):
        if kind == "post":
            Port(half.upper, 0).start_receive(1 << 62 | index, 7, source, tag, 100, 0)
            oracle.post(Posted(index, 7, source, tag))
        elif kind == "arrive":
            half.arrive(max(tag, 0), b"x" * index)
            oracle.arrive(Arrived(7, 1, max(tag, 0), index, b"", 0))
        else:
            told = _blocking(half, lambda source=source, tag=tag: _probe(half, 1, 0, source, tag))
            one = oracle.find(Posted(index, 7, source, tag))
            assert told == ((0, 1, one.source, one.tag, one.num_bytes, 0) if one else _NOTHING)
        half.turn()


def test_a_probe_that_waits_is_told_when_its_message_has_come(tmp_path: Path) -> None:
    half = _Half(str(tmp_path / "channel"))
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(_probe(half, 2, CallFlag.BLOCKING, ANY, 3)), daemon=True)
    thread.start()
    while not half.engine.waiting:
        half.turn()
    half.arrive(4, b"another")
    half.turn()
    assert half.engine.waiting == 1 << 2 and half.lower.pending() == 1 << 2
    half.engine.set(True, 0)
    half.arrive(3, b"abc")
    half.turn()
    assert half.engine.waiting == 1 << 2, "nothing is told while closed"
    half.engine.set(False, 0)
    half.turn()
    thread.join(60)
    assert told == [(0, 1, 1, 3, 3, 0)] and half.engine.waiting == 0
    assert [one.tag for one in half.matching.arrived] == [4, 3]


@pytest.mark.parametrize("flags", [CallFlag.MATCHED, CallFlag.MATCHED | CallFlag.BLOCKING])
def test_one_that_takes_its_message_is_for_python_when_the_message_is_there(tmp_path: Path, flags: int) -> None:
    served: list[int] = []

    def serve(slot: int) -> int:
        served.append(slot)
        PROBE_REPLY.pack_into(half.lower.bodies[slot], 0, 0, 1, 1, 3, 5, 17)
        return 0

    half = _Half(str(tmp_path / "channel"), serve=serve)
    if not flags & CallFlag.BLOCKING:
        assert _blocking(half, lambda: _probe(half, 4, flags, 1, 3)) == _NOTHING and not served
    half.arrive(3, b"hello")
    assert _blocking(half, lambda: _probe(half, 4, flags, 1, 3)) == (0, 1, 1, 3, 5, 17) and served == [4]
