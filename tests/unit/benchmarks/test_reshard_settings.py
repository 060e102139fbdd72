"""Settings come from the environment, and rows outlive an interrupted run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import Journal, Row
from benchmarks.reshard.netns import chosen_cases
from benchmarks.reshard.settings import Settings


def test_size_rate_and_repeats_are_those_of_the_environment() -> None:
    given = {"SIZE_MIB": "32", "RATE_MBIT": "50", "REPEATS": "5", "DEVICES": "4", "PEERS": "0", "PARTS": "links"}
    settings = Settings.of(given)
    assert (settings.size_mib, settings.rate_mbit, settings.num_repeats, settings.num_devices) == (32, 50, 5, 4)
    assert settings.links == "32 MiB over 50 Mbit/s, 4 devices"
    assert not settings.with_peers and settings.parts == ("links",)
    with pytest.raises(ValueError, match="rate_mbit is 0, expected at least 1"):
        Settings.of({"RATE_MBIT": "0"})
    with pytest.raises(ValueError, match="parts .'wire'. are unknown"):
        Settings.of({"PARTS": "wire"})


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("F5(4,2)", ["F5 1 -> (4,2)"]),
        ("F5 1 -> (2,2), N1", ["F5 1 -> (2,2)", "N1"]),
        ("N3", ["N3a", "N3b", "N3c"]),
        ("F6", [f"F6-{number}" for number in (1, 2, 3, 4, 5, 6, 7, 9)]),
    ],
)
def test_cases_are_chosen_by_the_beginnings_of_their_names(asked: str, names: list[str]) -> None:
    chosen = chosen_cases(Settings.of({"CASES": asked, "PEERS": "0"}))
    assert [case.name.split(":")[0] for case in chosen] == names
    assert not any(case.peers for case in chosen)


def test_a_case_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no case begins with one of .'F7'"):
        chosen_cases(Settings.of({"CASES": "F7"}))


def test_the_quick_set_is_a_handful_of_the_whole() -> None:
    quick, whole = (chosen_cases(Settings.of({"QUICK": quick})) for quick in ("1", "0"))
    assert len(quick) == 7 and {case.name for case in quick} < {case.name for case in whole}


@pytest.mark.procs
def test_rows_are_written_as_they_come_and_kept_when_they_are_of_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases() -> dict[str, float]:
        return {row["case"]: row["value"] for row in json.loads((tmp_path / "reshard.json").read_text())["rows"]}

    def journal(*, keeps: bool = False, links: str = "16 MiB") -> Journal:
        return Journal("reshard", 1, tmp_path, keeps=keeps, notes=[links])

    first = journal()
    first.add([Row("a", 1.0, "s")])
    assert cases() == {"a": 1.0}
    first.add([Row("b", 2.0, "s")])
    assert cases() == {"a": 1.0, "b": 2.0}
    journal(keeps=True).add([Row("a", 3.0, "s")])
    assert cases() == {"a": 3.0, "b": 2.0}
    with pytest.raises(ValueError, match="its notes is .'16 MiB'., expected .'32 MiB'."):
        journal(keeps=True, links="32 MiB")
    journal(links="32 MiB").add([Row("c", 4.0, "s")])
    assert cases() == {"c": 4.0}
    monkeypatch.setattr("benchmarks.report.find_commit", lambda: "another")
    with pytest.raises(ValueError, match="its commit is .*, expected another"):
        journal(keeps=True, links="32 MiB")
