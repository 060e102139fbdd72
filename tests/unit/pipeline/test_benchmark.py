"""The simulated benchmark runs, tiny, and reaches its goals in it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

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


def test_the_page_its_plot_and_its_pictures_are_written(tmp_path: Path) -> None:
    simulated.main(tmp_path, sizes=((2, 4),), nums=(4,))
    page = (tmp_path / "simulated.md").read_text()
    assert "## 2 stages, 4 micro-batches" in page
    assert "## Time against memory" in page
    pictures = sorted(tmp_path.glob("*.svg"))
    assert len(pictures) == 8
    for picture in pictures:
        ElementTree.fromstring(picture.read_text())
