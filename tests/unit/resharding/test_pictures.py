"""Pictures and traces show each message where it belongs."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from remesh.resharding import plan_reshard
from remesh.resharding.model.program import Timing
from remesh.resharding.pictures.draw import Lanes, collect_bars, draw_svg, draw_text
from remesh.resharding.pictures.trace import build_trace
from remesh.resharding.planning.simulate import simulate_plan
from tests.unit.resharding.cases import host_maps, move_lists

HOSTS = {0: "a", 1: "a", 2: "b", 3: "c & d"}
MESSAGES = [
    Timing(1, 0, 0, 2, 100, 0.0, 1.0),
    Timing(1, 1, 1, 2, 100, 1.0, 2.0),
    Timing(1, 1, 2, 3, 100, 1.0, 2.0),
    Timing(1, 2, 0, 1, 50, 2.0, 2.0),
    Timing(1, 3, 2, 3, 100, 3.0, 4.0),
]


def test_text_shows_who_is_busy_with_whom() -> None:
    assert draw_text(MESSAGES, HOSTS, width=8).splitlines() == [
        "a     out |1111....|",
        "b     out |..22..22|",
        "b     in  |0000....|",
        "c & d in  |..11..11|",
        "           0 .. 4 s    0=a 1=b 2=c & d",
    ]


def test_lanes_may_be_ranks() -> None:
    text = draw_text(MESSAGES, HOSTS, width=4, lanes=Lanes.RANKS)
    assert "rank 0 out |2...|" in text
    assert "rank 1 out |.2..|" in text
    assert ("rank 1", "in") in collect_bars(MESSAGES, HOSTS, Lanes.RANKS)


def test_messages_without_a_gap_and_with_one_other_end_are_one_bar() -> None:
    bars = collect_bars(MESSAGES, HOSTS)
    assert [(bar.start_s, bar.finish_s, bar.nbytes, bar.last_round) for bar in bars["a", "out"]] == [(0, 2, 200, 1)]
    assert [(bar.start_s, bar.finish_s) for bar in bars["b", "out"]] == [(1, 2), (3, 4)]


def test_svg_is_well_formed_and_says_what_it_shows() -> None:
    root = ElementTree.fromstring(draw_svg(MESSAGES, HOSTS, title="x < y", unit="ms", bound_s=3.0))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"x < y", "a out", "b in", "c & d in"} <= set(texts)
    assert {"time, ms", "lower bound 3", "at the other end:", "a", "b", "c & d"} <= set(texts)
    tips = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "b: 200 bytes, rounds 0 to 1" in tips
    assert "lower bound" in tips


def test_a_legend_names_a_few_and_counts_the_rest() -> None:
    hosts = {rank: f"h{rank}" for rank in range(30)}
    messages = [Timing(1, n, n, n + 1, 100, float(n), n + 1.0) for n in range(29)]
    root = ElementTree.fromstring(draw_svg(messages, hosts))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"h0", "h23", "and 6 more"} <= set(texts)


def test_nothing_to_draw_is_said() -> None:
    assert draw_text([], HOSTS) == "(nothing is sent)"
    ElementTree.fromstring(draw_svg([], HOSTS))
    assert build_trace({"planned": []}, HOSTS)["traceEvents"]


def test_a_trace_lays_planned_beside_measured() -> None:
    late = [Timing(1, m.round, m.giver, m.taker, m.nbytes, m.start_s + 1, m.finish_s + 2) for m in MESSAGES]
    trace = json.loads(json.dumps(build_trace({"planned": MESSAGES, "measured": late}, HOSTS)))
    events = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(processes.values()) == {f"{way}: {host}" for way in ("planned", "measured") for host in HOSTS.values()}
    sent = [event for event in events if event["ph"] == "X" and event["name"] == "to rank 2"]
    assert [(processes[event["pid"]], event["ts"], event["dur"]) for event in sent] == [
        ("planned: a", 0.0, 1e6),
        ("planned: a", 1e6, 1e6),
        ("measured: a", 1e6, 2e6),
        ("measured: a", 2e6, 2e6),
    ]
    assert sent[0]["args"] == {"round": 0, "bytes": 100, "bytes_per_s": 100.0}


@given(st.data())
def test_any_plan_can_be_drawn(data: st.DataObject) -> None:
    moves = data.draw(move_lists())
    hosts = data.draw(host_maps(moves))
    plan = plan_reshard(moves, hosts, chunk_bytes=64)
    messages = simulate_plan(plan).messages
    lanes = data.draw(st.sampled_from(Lanes))
    ElementTree.fromstring(draw_svg(messages, plan.host_of, lanes=lanes, bound_s=float(plan.lower_bound_bytes)))
    lines = draw_text(messages, plan.host_of, lanes=lanes, width=30).splitlines()
    drawn = [line for line in lines if line.endswith("|")]
    assert len({len(line) for line in drawn}) <= 1
    json.dumps(build_trace({"planned": messages}, plan.host_of), allow_nan=False)
    carried = sum(bar.nbytes for bars in collect_bars(messages, plan.host_of, Lanes.RANKS).values() for bar in bars)
    assert carried == pytest.approx(2 * sum(message.nbytes for message in messages))


def test_pictures_of_large_plans_stay_small() -> None:
    hosts = {rank: f"h{rank:03d}" for rank in range(100)}
    messages = [
        Timing(1, turn, rank, (rank + 1 + turn % 97) % 100, 1, float(turn), turn + 1.0)
        for turn in range(1000)
        for rank in range(0, 100, 10)
    ]
    text = draw_text(messages, hosts, width=40)
    assert len(text.splitlines()) == 64 + 2
    assert "(46 more lanes)" in text
    assert "+=38 more" in text
    root = ElementTree.fromstring(draw_svg(messages, hosts))
    bars = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.get("height") == "16"]
    assert len(bars) <= 64 * 400
    tips = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(tip.startswith("several: ") for tip in tips)
