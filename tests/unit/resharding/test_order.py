"""Chunks tile their streams; rounds keep every rank to one message each way and relays behind their source."""

from __future__ import annotations

from hypothesis import given, strategies as st

from remesh.layout import Box
from remesh.resharding.schedule.chunks import Part, cut_streams
from remesh.resharding.schedule.order import Sending
from remesh.resharding.schedule.senders import Hop, Route
from remesh.resharding.schedule.timeline import Relay, compute_rounds
from tests.support.layouts import indices_of


@st.composite
def streams(draw: st.DrawFn) -> list[list[Part]]:
    found = []
    tensor = 0
    for _ in range(draw(st.integers(1, 3))):
        parts = []
        for itemsize in sorted(draw(st.lists(st.sampled_from([1, 2, 4, 16]), min_size=1, max_size=4)), reverse=True):
            shape = draw(st.lists(st.integers(1, 9), max_size=3))
            box = Box.at([draw(st.integers(0, 3)) for _ in shape], shape)
            parts.append(Part(tensor, box, box.size * itemsize))
            tensor += 1
        found.append(parts)
    return found


@given(streams(), st.data())
def test_chunks_hold_every_element_once_and_stay_within_their_size(
    found: list[list[Part]], data: st.DataObject
) -> None:
    total = sum(part.nbytes for parts in found for part in parts)
    stops = sorted({*data.draw(st.lists(st.integers(1, total), max_size=3)), total})
    routes = [Route(start, stop, ()) for start, stop in zip([0, *stops], stops, strict=False)]
    sizes = [data.draw(st.sampled_from([64, 100, 1 << 20])) for _ in routes]
    seen: dict[int, list[tuple[int, ...]]] = {}
    order = []
    sent = [0] * len(routes)
    for cut in cut_streams(found, routes, sizes):
        assert cut.chunk.nbytes <= sizes[cut.route]
        itemsizes = [part.nbytes // part.box.size for part in cut.chunk.parts]
        assert itemsizes == sorted(itemsizes, reverse=True)
        order.append((cut.route, cut.stream))
        sent[cut.route] += cut.chunk.nbytes
        for part in cut.chunk.parts:
            seen.setdefault(part.tensor, []).extend(indices_of(part.box))
    assert [route for route, _ in order] == sorted(route for route, _ in order)
    for parts in found:
        for part in parts:
            # Row-major order of the elements survives all cuts.
            assert seen[part.tensor] == indices_of(part.box)
    # A route ends within one element of where it should, or a small fraction of all bytes.
    at = 0
    for route, nbytes in zip(routes, sent, strict=True):
        at += nbytes
        assert abs(at - route.stop) <= 16 + total // 256


@st.composite
def sending_lists(draw: st.DrawFn) -> list[Sending]:
    """Chunks that spread from rank to rank."""
    found: list[Sending] = []
    for chunk in range(draw(st.integers(0, 8))):
        informed = {draw(st.integers(0, 5)): -1}
        for taker in draw(st.permutations(range(6)))[: draw(st.integers(1, 5))]:
            if taker in informed:
                continue
            giver = draw(st.sampled_from(sorted(informed)))
            found.append(Sending(giver, taker, chunk, draw(st.integers(1, 9)), informed[giver]))
            informed[taker] = len(found) - 1
    return found


@given(sending_lists())
def test_rounds_keep_ranks_free_and_relays_in_order(found: list[Sending]) -> None:
    host_of = {rank: f"host{rank}" for sending in found for rank in (sending.giver, sending.taker)}
    rounds = compute_rounds(found, host_of)
    busy = set()
    for sending, at in zip(found, rounds, strict=True):
        assert at >= 0
        for end in ((at, sending.giver, "gives"), (at, sending.taker, "takes")):
            assert end not in busy
            busy.add(end)
        if sending.after >= 0:
            assert rounds[sending.after] < at
    assert set(rounds) == set(range(max(rounds, default=-1) + 1))
    assert rounds == compute_rounds(found, host_of)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(5, 9)), min_size=1, max_size=40))
def test_rounds_without_relays_are_fewer_than_twice_the_busiest_rank_has(pairs: list[tuple[int, int]]) -> None:
    sendings = [Sending(giver, taker, n, 1, -1) for n, (giver, taker) in enumerate(pairs)]
    rounds = compute_rounds(sendings, {rank: f"host{rank}" for rank in range(10)})
    ends = [end for pair in pairs for end in pair]
    busiest = max(map(ends.count, ends))
    assert busiest <= max(rounds) + 1 <= 2 * busiest - 1


def test_entries_are_spread_over_the_devices_of_a_host() -> None:
    relay = Relay({0: "a", **dict.fromkeys((1, 2, 3, 4), "b")})
    for chunk in range(40):
        relay.add_chunk(chunk, 10, [Hop("a", "b")], (0,), (1, 2, 3, 4))
    entered = [sending.taker for sending in relay.sendings if sending.giver == 0]
    assert len(entered) == 40  # every chunk enters the host once
    assert {entered.count(rank) for rank in (1, 2, 3, 4)} <= set(range(7, 14))
    sent = [sum(s.nbytes for s in relay.sendings if s.giver == rank) for rank in (1, 2, 3, 4)]
    assert max(sent) - min(sent) <= 20
