"""The page of measured recoveries says what the report says, misses included; a small control plane runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elastic import __main__ as room, bounds, control_plane, launcher_start
from benchmarks.elastic.attempts import Count, tell_trial
from benchmarks.elastic.peers import find_versions
from benchmarks.elastic.phases import PHASES, Recovery, split_recovery
from benchmarks.elastic.settings import Settings, estimate_minutes
from benchmarks.elastic.tables import draw_plane, make_page, make_restarts_page
from benchmarks.report import Row, describe_value
from tests.unit.benchmarks.described import DESCRIBED


def row(case: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit, "goal": None, "ok": None, "peer": None} | more


def page_of(rows: list[dict[str, Any]]) -> str:
    return make_page({**DESCRIBED, "rows": rows})


def test_a_recovery_stands_beside_its_peers_with_its_phases() -> None:
    rows = [
        row("one node killed: remesh, kills", 20, "kills"),
        row("one node killed: remesh, jobs that did not come back", 0, "jobs", goal=0, ok=True),
        row("one node killed: remesh, kill to next step, p50", 0.1, "s"),
        row("one node killed: torchrun, kills", 3, "kills"),
        row("one node killed: torchrun over remesh, p50", 41.2, "ratio", goal=20.0, ok=True),
        row("one node killed: torchrun, kill to next step, p50", 4.12, "s"),
        *(row(f"one node killed: remesh, {phase}, p50", 0.01, "s") for phase in PHASES),
        row("node with the rendezvous killed: torchrun, kills", 3, "kills"),
        row("node with the rendezvous killed: torchrun, jobs that did not come back", 3, "jobs"),
        row("snapshots", 0.05, "ratio", goal=0.03, ok=False),
    ]
    page = page_of(rows)
    assert "| one node killed | remesh | 20 | 0 (0, reached) | 0.100 |  |  |  |  |" in page
    assert "| one node killed | torchrun | 3 |  | 4.120 |  | **41.2** (20, reached) |  |  |" in page
    assert "| node with the rendezvous killed | torchrun | 3 | 3 |" in page
    assert "| one node killed, p50 | 10 | 10 | 10 | 10 | 10 | 10 |" in page
    assert "| snapshots | 0.05 | 0.03, **missed** |" in page
    assert "Not run this time: the control plane, remesh, torchrun, torchft, nvrx." in page


def test_restarts_stand_beside_torchruns_with_what_they_wasted() -> None:
    ours, theirs = (f"restart mode, c10d: {launcher}" for launcher in ("remesh", "torchrun"))
    rows = [
        row(f"{ours}, kills", 20, "kills"),
        row(f"{ours}, back at the first attempt", 20, "jobs", goal=20, ok=True),
        row(f"{ours}, never back", 0, "jobs"),
        row(f"{ours}, attempts wasted", 0, "attempts"),
        row(f"{ours}, kill to through, p50", 3.21, "s"),
        row(f"{theirs}, kills", 12, "kills"),
        row(f"{theirs}, back at the first attempt", 1, "jobs"),
        row(f"{theirs}, never back", 2, "jobs"),
        row(f"{theirs}, attempts wasted", 17, "attempts"),
    ]
    page = make_restarts_page({**DESCRIBED, "rows": rows})
    assert "| c10d | remesh | 20 | 20 (20, reached) | 0 | 0 | 3.2 |" in page
    assert "| c10d | torchrun | 12 | 1 | 2 | 17 |  |" in page


def test_a_start_stands_beside_torchruns_with_its_goal() -> None:
    start = launcher_start.rows_of(launcher_start.HELP, [2.0, 2.2, 9.0], [2.0, 2.0, 3.0])
    loading = launcher_start.rows_of(list(launcher_start.SCRIPTS)[-1], [8.0], [10.0])
    kills = Count("remesh", "c10d").rows()
    page = make_restarts_page({**DESCRIBED, "rows": [asdict(one) for one in (*kills, *start, *loading)]})
    assert "| --help | 2.20 | 2.00 | 1.10 (1, **missed**) |" in page
    assert "| workers that import torch and make an optimizer | 8.00 | 10.00 | 0.80 (1, reached) |" in page


def test_an_attempt_is_wasted_unless_all_came_through_it(tmp_path: Path) -> None:
    for name in ("0-0-11", "1-0-12", "killed", "0-1-13", "1-1-14", "0-2-15", "1-2-16"):
        (tmp_path / name).touch()
    count = Count("remesh", "c10d", [tell_trial(tmp_path, (None, None), "")])
    assert [row.value for row in count.rows()] == [1, 0, 1, 2]
    for name in ("ok-0-2-15", "ok-1-2-16"):
        (tmp_path / name).touch()
    count.trials = [tell_trial(tmp_path, (0, 0), "")]
    assert [row.value for row in count.rows()][:4] == [1, 0, 0, 1]
    assert count.rows()[1].ok is False


def test_phases_end_where_the_last_survivor_gets_there_and_add_up() -> None:
    def event(kind: str, who: str, t: float, generation: int) -> dict[str, Any]:
        return {"kind": kind, "who": who, "t": t, "number" if kind == "generation" else "generation": generation}

    told = [event("step", who, t, 6) for who, t in (("w1", -0.045), ("w1", -0.04), ("w2", -0.04), ("dead", -0.01))]
    told += [event("left", who, t, 6) for who, t in (("w1", 0.02), ("w2", 0.03))]
    told += [event("meeting", "a", 0.025, 7), event("generation", "a", 0.05, 7)]
    told += [event(kind, who, t, 7) for kind, t in (("grown", 0.06), ("filled", 0.08), ("step", 0.1)) for who in "xy"]
    phases = split_recovery(told, killed_s=0.0, generation=7, num_survivors=2, step_s=0.05)
    assert phases == pytest.approx(
        {
            "computing": 0.01,
            "noticed": 0.02,
            "met": 0.0,
            "planned": 0.02,
            "rebuilt": 0.01,
            "moved": 0.02,
            "first step": 0.02,
        }
    )
    assert sum(phases.values()) == pytest.approx(0.1)
    longer = split_recovery(told, killed_s=0.0, generation=7, num_survivors=2, step_s=5.0)
    assert longer["computing"] == pytest.approx(0.03), "nobody computed any more when the last was out"


def test_a_recovery_stands_beside_its_bound() -> None:
    phases = dict.fromkeys(PHASES, 0.01)
    rows = bounds.rows_of([Recovery(0.07, 0, phases)] * 3, [dict.fromkeys(PHASES, 0.005)] * 3)
    page = bounds.make_page({**DESCRIBED, "rows": [asdict(one) for one in rows]})
    assert "| rebuilt | 10.0 | 5.0 | 2.0 | two gloo groups made by the backend alone |" in page
    assert "| kill to next step, without computing | 60.0 | 30.0 | 2.0 |" in page
    assert "Goal for the whole: 60 ms, **missed**." in page


def test_messages_of_an_event_grow_like_the_agents_and_no_faster() -> None:
    small, large = (control_plane.measure(size)[0] for size in (16, 64))
    for before, after in zip(small, large, strict=True):
        assert after.event == before.event
        assert after.messages / 64 < 1.25 * before.messages / 16, after.event


def test_the_picture_and_the_table_have_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "QUICK_SIZES", (16, 64))
    rows = [asdict(one) for one in control_plane.rows(quick=True)]
    page, picture = page_of(rows), draw_plane(rows)
    assert page.count("| node joins | ") == 2
    assert picture.count("<polyline") == 6 and "node joins" in picture


def test_settings_refuse_what_nobody_knows_and_the_whole_fits_in_half_an_hour() -> None:
    with pytest.raises(ValueError, match=r"PARTS has \['nodes'\]"):
        Settings.of({"PARTS": "nodes"})
    assert Settings.of({"QUICK": "1"}).num_kills == 1
    assert sum(estimate_minutes(Settings()).values()) <= 30


def test_programs_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    assert find_versions(tmp_path / "nothing") == {}
    (tmp_path / "torchft-0.2.0.dist-info").mkdir()
    (tmp_path / "torchft-0.2.0.dist-info" / "METADATA").write_text("Name: torchft\nVersion: 0.2.0\n")
    assert find_versions(tmp_path) == {"torchft": "0.2.0"}


@pytest.mark.procs
def test_rows_of_an_interrupted_run_are_kept_and_a_later_run_may_add_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_settings: Settings) -> Iterator[list[Row]]:
        yield [Row("a: p50", 1.0, "s"), Row("b", 2.0, "s")]
        yield [Row("a: p50", 3.0, "s")]
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "experiments", interrupted)
    with pytest.raises(KeyboardInterrupt):
        room.run(Settings(), tmp_path)
    assert _values(tmp_path) == {"a: p50": 3.0, "b": 2.0}
    monkeypatch.setattr(room, "experiments", lambda _: iter([[Row("c", 4.0, "s")]]))
    room.run(Settings(keeps=True), tmp_path)
    assert _values(tmp_path) == {"a: p50": 3.0, "b": 2.0, "c": 4.0}


def _values(folder: Path) -> dict[str, float]:
    return {row["case"]: row["value"] for row in json.loads((folder / "elastic.json").read_text())["rows"]}


def test_values_stand_in_units_that_people_read() -> None:
    told = [("s", 0.0002417), ("s", 1.5), ("bytes", 12582912.0), ("bytes", 300.0), ("ratio", 1.025), ("x bound", 2.0)]
    read = ["0.242 ms", "1.5 s", "12 MiB", "0.293 KiB", "1.02", "2 x bound"]
    assert [describe_value(value, unit) for unit, value in told] == read
