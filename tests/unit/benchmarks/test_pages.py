"""Pages of measured figures: each row stands in its table, misses included, and nobody could fail to repeat a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import pages
from benchmarks.elastic import bounds, control_plane, launcher_start
from benchmarks.elastic.attempts import Count
from benchmarks.elastic.phases import PHASES, Recovery
from benchmarks.page import DOCS, NotRepeatable, Page, Plain, check_commit
from benchmarks.report import Row, at_least, at_most
from benchmarks.reshard import first_byte, scale
from tests.unit.benchmarks.described import DESCRIBED

PAGES = {page.name: page for page in pages.PAGES}


def report_of(rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    return {**DESCRIBED, **more, "rows": [asdict(row) for row in rows]}


def fill(name: str, rows: Sequence[Row]) -> dict[str, list[str]]:
    """The lines of each table of a page, as the documentation has it, without those of the heads."""
    text = PAGES[name].fill((DOCS / f"{name}.md").read_text(), report_of(rows))
    parts = [part.partition(" -->\n\n") for part in text.split("<!-- figures: ")[1:]]
    lines = {place: rest.partition("\n\n<!-- /figures -->")[0].split("\n") for place, _, rest in parts}
    return {place: found[2:] for place, found in lines.items() if len(found) > 1}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_place_for_each_of_its_tables_and_says_what_was_not_run(name: str) -> None:
    page = PAGES[name]
    text = page.fill((DOCS / f"{name}.md").read_text(), report_of([]))
    assert text.count("*Not run this time.*") == len(page.tables)
    assert page.fill(text, report_of([])) == text


def _recovery(case: str, value: float, unit: str, goal: float | None = None) -> Row:
    return at_least(f"one node killed: {case}", value, unit, goal)


_RESTARTS = [
    at_least("restart mode, c10d: remesh, kills", 20, "kills", None),
    at_least("restart mode, c10d: remesh, back at the first attempt", 20, "jobs", 20),
    Row("restart mode, c10d: remesh, kill to through, p50", 3.21, "s"),
    Row("restart mode, c10d: torchrun, kills", 12, "kills"),
    *launcher_start.rows_of(launcher_start.HELP, [2.0, 2.2, 9.0], [2.0, 2.0, 3.0]),
]
_RECOVERIES = [
    _recovery("remesh, kills", 20, "kills"),
    _recovery("remesh, jobs that did not come back", 0, "jobs", 0),
    _recovery("remesh, kill to next step, p50", 0.1, "s"),
    _recovery("torchrun, kills", 3, "kills"),
    _recovery("torchrun over remesh, p50", 41.2, "ratio", 20.0),
    *(_recovery(f"remesh, {phase}, p50", 0.01, "s") for phase in PHASES),
    at_most("snapshots", 0.05, "ratio", 0.03),
    Row("restart mode, c10d: remesh, kills", 20, "kills"),
]
_MOVES = [
    at_most("plan of x", 0.5, "s", 0.05),
    at_most("F5 1 -> (2,2), remesh", 1.01, "x bound", 1.03),
    Row("F5 1 -> (2,2), gloo broadcast", 2.0, "x bound", peer="gloo broadcast"),
    at_most("N1: a, b, remesh", 1.02, "x bound", 1.04),
    Row("N1: a, b, naive", 2.0, "x bound", peer="naive"),
    at_most("N1: a, b: bytes over NICs, counted over planned", 1.046, "ratio", 1.07),
    Row("N1: a, b: t", 0.701, "s"),
    at_most("N2, remesh", 1.3, "x bound", 1.06),
    Row("N2: no verdict, t varied by 9.0%, load 7.0", 0.09, "spread"),
    at_most("rows to columns", 2.7, "ratio", 2.0, bound=2.5),
]
_SAVES = [
    at_least("4 tensors of 4 KiB: load, DCP over ours", 21.4, "ratio", 20.0),
    at_most("an eighth of the columns of 64 MiB: bytes read over wanted", 1.5, "ratio", 1.1),
    Row("256 MiB in the background by a thread: blocked", 0.0052, "s"),
    Row("256 MiB: save with SHA-256 over save", 1.5, "ratio"),
    at_most("256 MiB: convert to zarr, peak extra memory", float(3 << 20), "bytes", float(4 << 20)),
    Row("8 ranks, 20 tensors each: of that, validated", 2.5, "s"),
]
_BOUNDS = bounds.rows_of([Recovery(0.07, 0, dict.fromkeys(PHASES, 0.01))] * 3, [dict.fromkeys(PHASES, 0.005)] * 3)
_PIPELINES = [
    Row("stubs S=2 M=32 c=1F: fraction of the signal bound, remesh", 1.01, "fraction", bound=1.0),
    Row("stubs S=2 M=32 c=1F: fraction of the signal bound, 1F1B, blocking", 0.7, "fraction", bound=1.0),
    at_most("stubs S=2 M=32 c=1F: predicted step time, largest error", 0.017, "fraction", 0.05),
    Row("ablation U-Transformer, paced, M=4: Eager", 1.4, "ratio"),
    Row("simulated ablation, U-shaped S=4 c=0.5F M=4: eager", 1.3, "ratio"),
]


@pytest.mark.parametrize(
    ("name", "rows", "lines"),
    [
        (
            "elastic/measured",
            _RECOVERIES,
            {
                "recovery": [
                    "| one node killed | remesh | 20 | 0 (0, reached) | 100 ms |  |  |  |  |",
                    "| one node killed | torchrun | 3 |  |  |  | 41.20 (20, reached) |  |  |",
                ],
                "phases": ["| one node killed | p50 | 10 ms | 10 ms | 10 ms | 10 ms | 10 ms | 10 ms | 10 ms |"],
                "costs": ["| snapshots | 0.05 | 0.03, **missed** |"],
            },
        ),
        (
            "elastic/restarts",
            [*_RESTARTS, *Count("remesh", "etcd").rows()],
            {
                "restarts": [
                    "| c10d | remesh | 20 | 20 (20, reached) | 3.21 s |  |  |",
                    "| c10d | torchrun | 12 |  |  |  |  |",
                    "| etcd | remesh | 0 | 0 (0, reached) |  | 0 | 0 |",
                ],
                "starts": ["| --help | 2.2 s | 2 s | 1.10 (1, **missed**) |"],
            },
        ),
        (
            "elastic/recovery",
            _BOUNDS,
            {
                "phases": [
                    *(f"| {phase} | 10 ms | 5 ms | 2.0 |  |" for phase in PHASES),
                    "| kill to next step | 70 ms | 35 ms | 2.0 | 60 ms, **missed** |",
                    "| kill to next step, without computing | 60 ms | 30 ms | 2.0 |  |",
                    "| kills | 3 kills |  |  |  |",
                ]
            },
        ),
        (
            "reshard/measured",
            _MOVES,
            {
                "one sender": ["| F5 1 -> (2,2) | 1.010 (1.03, reached) | 2.000 |"],
                "beyond": [
                    "| N1: a, b | 1.020 (1.04, reached) | 2.000 | 1.05 (1.07, reached) | 701 ms |",
                    "| N2 | 1.300 (1.06, **missed**) |  |  |  |",
                ],
                "planner and loopback": [
                    "| plan of x | 500 ms |  | 50 ms, **missed** |",
                    "| N2: no verdict, t varied by 9.0%, load 7.0 | 0.09 spread |  |  |",
                    "| rows to columns | 2.7 | 2.5 | 2, **missed**; its bound lies above it |",
                ],
            },
        ),
        (
            "checkpoint/measured",
            _SAVES,
            {
                "saves and loads": ["| 4 tensors of 4 KiB: load, DCP over ours | 21.4 | 20, reached |"],
                "parts": ["| an eighth of the columns of 64 MiB: bytes read over wanted | 1.5 | 1.1, **missed** |"],
                "background": ["| 256 MiB in the background by a thread: blocked | 5.2 ms |  |"],
                "sums and conversions": [
                    "| 256 MiB: save with SHA-256 over save | 1.5 |  |",
                    "| 256 MiB: convert to zarr, peak extra memory | 3 MiB | 4 MiB, reached |",
                ],
                "planning": ["| 8 ranks, 20 tensors each: of that, validated | 2.5 s |  |"],
            },
        ),
        (
            "integrations/measured",
            [
                at_least("sync of 4 MiB to 2 engines: gain", 5.0, "ratio", 2.0),
                Row("dcp, 48 MiB, save: ours", 0.25, "s"),
            ],
            {
                "weights": ["| sync of 4 MiB to 2 engines: gain | 5 | 2, reached |"],
                "saves and loads": ["| dcp, 48 MiB, save: ours | 250 ms |  |"],
            },
        ),
        (
            "pipeline/measured",
            _PIPELINES,
            {
                "fractions": ["| stubs S=2 M=32 c=1F | 1.01 | 0.70 |"],
                "gains": ["| stubs S=2 M=32 c=1F: predicted step time, largest error | 0.017 | 0.05, reached |"],
                "ablation": ["| 4 | 1.40 |"],
            },
        ),
        ("pipeline/simulated", _PIPELINES, {"ablation": ["| 4 | 1.30 |"]}),
        (
            "mpi/matrix",
            [at_least("pair a -> b", 1.0, "right", 1.0), at_least("pair c -> a", 0.0, "right", 1.0)],
            {"pairs": ["| 1 | a |  | = | · |", "| 2 | b | · |  | · |", "| 3 | c | **x** | · |  |"]},
        ),
    ],
)
def test_every_row_stands_once_in_its_table(name: str, rows: Sequence[Row], lines: dict[str, list[str]]) -> None:
    assert fill(name, rows) == lines


def test_the_control_plane_has_every_event_in_its_tables_and_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "QUICK_SIZES", (16, 64))
    rows = control_plane.rows(quick=True)
    found = fill("elastic/measured", rows)
    assert [line.split(" | ")[:2] for line in found["control plane"][:2]] == [
        ["| first meeting", "16"],
        ["| first meeting", "64"],
    ]
    assert (len(found["control plane"]), len(found["growth"]), len(found["agents"])) == (12, 6, 2)
    picture = picture_of("elastic/measured", "control plane", rows)
    assert len(picture.findall("{*}polyline")) == 6


def picture_of(name: str, place: str, rows: Sequence[Row]) -> ElementTree.Element:
    picture = PAGES[name].tables[place].picture
    assert picture is not None
    return ElementTree.fromstring(picture.draw(PAGES[name].find(report_of(rows))[place]))


def test_planning_has_a_line_and_a_curve_for_each_move() -> None:
    rows = scale.rows(ranks=(8, 16), repeat=1)
    found = fill("reshard/scale", rows)["moves"]
    assert len(found) == len(scale.PAIRS)
    assert len(picture_of("reshard/scale", "moves", rows).findall("{*}polyline")) == len(scale.PAIRS)


def test_a_move_to_the_first_byte_is_one_line() -> None:
    rows = first_byte.rows_of([first_byte.Cost("S0R to RS0", 2_097_152, 0.05, 0.06, 10.0)])
    assert fill("reshard/first_byte", list(rows)) == {"moves": ["| S0R to RS0 | 2,097,152 | 50 ms | 60 ms | 10 MiB |"]}


def test_the_head_of_a_page_says_what_a_number_needs_to_be_judged() -> None:
    report = report_of([], notes=["torchft 0.2.0"], quick=True, load_before=[2.5, 0.2, 0.3])
    head = PAGES["elastic/measured"].head(report)
    for part in (
        "`make bench ROOM=elastic && python -m benchmarks.pages elastic/measured`",
        "Commit 0123456789ab; 2 cores, Linux-6.1, Python 3.11.7, torch 2.13.0; ",
        "load 2.5, 0.2, 0.3 before, 2.0, 1.0, 0.5 after",
        "Runs: as many",
        "; torchft 0.2.0; other programs ran beside; the small set of `QUICK=1`.*",
    ):
        assert part in head
    assert PAGES["reshard/ablation"].head(report).endswith("Nothing is measured: a model, the same on every machine.*")


@pytest.mark.parametrize(
    ("commit", "message"), [(None, "names no commit"), ("0123456789abcdef+", "0123456789ab with changes that were not")]
)
def test_a_page_of_a_report_that_nobody_can_repeat_is_refused(commit: str | None, message: str, tmp_path: Path) -> None:
    page = Page("room", "verb", "once", {"all": Plain()})
    path = tmp_path / "room.md"
    path.write_text(before := "*Figures written by x*\n<!-- figures: all -->\n<!-- /figures -->\n")
    with pytest.raises(NotRepeatable, match=message):
        page.write(report_of([Row("a", 1.0, "s")], commit=commit), tmp_path)
    assert path.read_text() == before
    page.write(report_of([Row("a", 1.0, "s")]), tmp_path)
    assert "| a | 1 s |  |" in path.read_text()
    check_commit(DESCRIBED, "doing")


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    page = Page("room", "verb", "once", {"all": Plain()})
    with pytest.raises(ValueError, match="found places for other, expected all"):
        page.fill("*Figures written by x*\n<!-- figures: other -->\n<!-- /figures -->\n", report_of([]))
    with pytest.raises(ValueError, match="found 0 lines"):
        page.fill("<!-- figures: all -->\n<!-- /figures -->\n", report_of([]))


def test_the_verb_tells_what_is_unknown_and_what_measures_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="found nothing/here, expected some of reshard/measured"):
        pages.main(["nothing/here"])
    monkeypatch.setattr("benchmarks.page.OUT", tmp_path)
    with pytest.raises(SystemExit, match="measure first: make bench ROOM=memory"):
        pages.main(["memory"])
    (tmp_path / "memory.json").write_text(json.dumps(report_of([], commit=None)))
    with pytest.raises(SystemExit, match="names no commit"):
        pages.main(["memory"])
