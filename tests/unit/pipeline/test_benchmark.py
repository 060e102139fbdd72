"""The simulated benchmark runs, tiny, and reaches its goals in it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.pages import PAGES
from benchmarks.pipeline import simulated
from remesh.pipeline.graph import StageGraph


def test_a_search_is_timed_and_compared() -> None:
    rows = [*simulated._search_rows(((2, 8),)), *simulated._smallest_rows(1)]
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]


def test_each_part_of_the_ablation_is_faster_than_the_one_before() -> None:
    for by_label in simulated.ablation((8,)).values():
        assert list(by_label) == list(simulated.ABLATION)
        assert list(by_label.values()) == sorted(by_label.values())


def test_more_memory_is_only_listed_if_it_saves_time() -> None:
    found = simulated.frontier(2, 8, 1.0)
    steps = [each.step_s for each in found]
    assert steps == sorted(set(steps), reverse=True)
    assert [max(peak.num_live for peak in each.peaks) for each in found] == list(range(1, len(found) + 1))


def test_blocking_is_the_slowest_and_the_searched_the_fastest() -> None:
    costs = simulated.Costs.uniform(StageGraph.chain(2), transfer_s=1)
    steps = {name: simulated.step_s(name, StageGraph.chain(2), costs, 8) for name in simulated.NAMES}
    assert max(steps, key=steps.__getitem__) == simulated.BLOCKING
    assert min(steps.values()) == steps[simulated.SEARCHED]


def test_pictures_are_written_and_the_frontier_is_on_the_page(tmp_path: Path) -> None:
    simulated.write_pictures(tmp_path)
    pictures = sorted(tmp_path.glob("*.svg"))
    assert len(pictures) == 7
    for picture in pictures:
        ElementTree.fromstring(picture.read_text())
    rows = [*simulated._frontier_rows(), *simulated._fraction_rows(((2, 32),))]
    (page,) = (page for page in PAGES if page.name == "pipeline/simulated")
    found = page.find({"rows": [asdict(row) for row in rows]})
    lines = page.tables["time against memory"].lines(found["time against memory"])
    assert lines[2] == "| at most 4 live, 1F1B | 85.00 | 0.67 |"
    heads, _, *lines = page.tables["S=2 M=32"].lines(found["S=2 M=32"])
    assert heads == f"| c | {' | '.join(simulated.NAMES)} |" and len(lines) == len(simulated.RATIOS)
