"""Rows of the elastic room: attempts and phases are counted, a small control plane runs, and rows outlive a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elastic import __main__ as room, control_plane
from benchmarks.elastic.attempts import Count, tell_trial
from benchmarks.elastic.peers import find_versions
from benchmarks.elastic.phases import split_recovery
from benchmarks.elastic.settings import Settings, estimate_minutes
from benchmarks.report import Row, describe_value


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


def test_messages_of_an_event_grow_like_the_agents_and_no_faster() -> None:
    small, large = (control_plane.measure(size)[0] for size in (16, 64))
    for before, after in zip(small, large, strict=True):
        assert after.event == before.event
        assert after.messages / 64 < 1.25 * before.messages / 16, after.event


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
