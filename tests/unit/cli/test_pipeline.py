"""``remesh pipeline`` draws, compares and searches, and refuses what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from remesh.cli import main
from remesh.pipeline.csv_text import read_csv
from remesh.pipeline.schedules import eager_split


def pipeline(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["pipeline", *arguments])


def test_a_schedule_is_drawn_and_weighed() -> None:
    result = pipeline("draw", "eager-split", "--stages", "4", "-m", "16", "--transfer", "1")
    assert result.exit_code == 0, result.output
    assert "rank 3 |" in result.output
    assert "step 60, with transfers in no time 54" in result.output
    assert "no schedule beats 54: all work of stage 3" in result.output
    assert "live micro-batches at most: 7, 5, 3, 1" in result.output


def test_pictures_and_tables_are_written_and_read_again(tmp_path: Path) -> None:
    svg, table = tmp_path / "step.svg", tmp_path / "step.csv"
    result = pipeline("draw", "eager-split", "--svg", str(svg), "--csv", str(table))
    assert result.exit_code == 0, result.output
    ElementTree.fromstring(svg.read_text())
    assert read_csv(table.read_text()).rows == eager_split(4, 8).rows
    again = pipeline("draw", str(table))
    assert again.exit_code == 0, again.output
    assert again.output.splitlines()[:5] == result.output.splitlines()[:5]


def test_a_table_with_several_stages_on_a_rank_is_drawn_without_a_bound(tmp_path: Path) -> None:
    table = tmp_path / "v.csv"
    table.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    result = pipeline("draw", str(table), "--stages", "4", "--transfer", "0.5")
    assert result.exit_code == 0, result.output
    assert "no schedule beats" not in result.output


def test_known_schedules_are_compared_with_the_searched_one() -> None:
    result = pipeline("compare", "--stages", "2", "-m", "32", "--transfer", "1")
    assert result.exit_code == 0, result.output
    for text in ("1f1b, blocking", "0.607", "eager-split", "searched", "bound: 98"):
        assert text in result.output


def test_a_costs_file_brings_skip_edges_and_rates(tmp_path: Path) -> None:
    stage = {"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, "stash_bytes": 10}
    edges = [{"source": n, "target": n + 1, "nbytes": 50} for n in range(3)]
    edges.append({"source": 0, "target": 3, "name": "skip", "nbytes": 100})
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"stages": [stage] * 4, "edges": edges, "rate_bytes_per_s": 100}))
    result = pipeline("search", "--costs", str(costs), "-m", "16", "--limit", "60", "--csv", str(tmp_path / "s.csv"))
    assert result.exit_code == 0, result.output
    assert "no schedule beats" in result.output
    peaks = result.output.split("live micro-batches at most: ")[1].splitlines()[0].split(", ")
    assert max(map(int, peaks)) <= 6
    assert pipeline("draw", str(tmp_path / "s.csv"), "--costs", str(costs)).exit_code == 0


def test_not_to_overlap_takes_longer() -> None:
    ways = ("async", "blocking")
    printed = [pipeline("draw", "1f1b", "--transfer", "1", "--transfers", way).output for way in ways]
    steps = [float(each.split("step ")[1].split(",")[0]) for each in printed]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("draw", "2f2b"), "expected a CSV file or one of gpipe"),
        (("draw", "1f1b", "--compute", "1,1"), "reading --compute '1,1': expected three times"),
        (("draw", "1f1b", "--compute", "1,1,-1"), "finite numbers >= 0"),
        (("draw", "1f1b", "--transfer", "-1"), "finite times >= 0"),
        (("draw", "1f1b", "--costs", "missing.json"), "missing.json"),
        (("draw", "1f1b", "--costs", "x.json", "--stages", "3"), "leave the other options out"),
        (("draw", "1f1b", "--svg", "missing/x.svg"), "writing missing"),
        (("search", "--limit", "0"), "keeps 1 bytes for a single micro-batch, its limit is 0"),
        (("search", "--tolerance", "-1"), "a tolerance >= 0"),
    ],
)
def test_what_makes_no_sense_is_one_message(arguments: tuple[str, ...], text: str) -> None:
    result = pipeline(*arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("text", ["[1]", "{", "{}"])
def test_a_costs_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    result = pipeline("compare", "--costs", str(tmp_path / "costs.json"))
    assert result.exit_code == 2
    assert "reading the costs" in result.output
