"""A measured page says what its figures need to be judged: the verb that repeats them, commit, machine, load, runs."""

from __future__ import annotations

import re

import pytest

from tests.rules.source_tree import ROOT

_DOCS = ROOT / "docs"
_HEAD = re.compile(r"^\*Figures written by `([^`]+)`, which repeats them\. (.*)\*$", re.MULTILINE)
_MODEL = "Nothing is measured: a model"
_NOTHING = "\N{EN DASH}"
_NEEDED = (r"Commit [0-9a-f]{7}", r"\d+ cores", r"load \d", r"Runs: \w")
PAGES = sorted(set(re.findall(r"\]\(([^)#]+\.md)", (_DOCS / "measured.md").read_text())))


def _cells(text: str) -> list[list[str]]:
    """The lines of all tables of a page."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("page", PAGES)
def test_a_measured_page_says_what_its_figures_need_to_be_judged(page: str) -> None:
    heads = _HEAD.findall((_DOCS / page).read_text())
    assert heads, f"docs/{page}: no line as benchmarks.page.Page.head writes it"
    for verb, told in heads:
        missing = [] if told.startswith(_MODEL) else [one for one in _NEEDED if not re.search(one, told)]
        assert not missing, f"docs/{page}: its head lacks {missing}"
        for module in re.findall(r"python -m (benchmarks[\w.]*)", verb):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"docs/{page}: no {module}"


def test_every_page_that_a_benchmark_writes_is_listed() -> None:
    written = {str(path.relative_to(_DOCS)) for path in _DOCS.rglob("*.md") if _HEAD.search(path.read_text())}
    assert written == set(PAGES), (
        f"docs/measured.md lists {set(PAGES) - written} too many and lacks {written - set(PAGES)}"
    )


def test_each_ratio_stands_on_its_page_in_the_line_of_its_case() -> None:
    ratios = _cells((_DOCS / "measured.md").read_text().partition("## Ratios")[2].partition("## Pages")[0])[2:]
    assert ratios
    for what, figure, case, link in ratios:
        page = re.findall(r"\(([^)]+)\)", link)[0]
        lines = [line for line in _cells((_DOCS / page).read_text()) if {*re.findall(r"`([^`]+)`", case)} <= {*line}]
        assert any(figure in {cell.strip("*").partition(" ")[0].strip("*") for cell in line} for line in lines), (
            f"docs/measured.md: {what}: found {figure}, expected what docs/{page} has of {case}"
        )


def test_the_readme_has_the_recoveries_as_they_were_measured() -> None:
    names = {"Remesh": "remesh", "torchrun": "torchrun", "torchft 0.2.0": "torchft", "NVRx 0.4.1": "nvrx"}
    page = (_DOCS / "elastic" / "measured.md").read_text()
    assert all(release in page for release in ("torchft 0.2.0", "nvrx 0.4.1"))
    measured = {(row[0], row[1]): row for row in _cells(page) if len(row) == 9}
    readme = (ROOT / "README.md").read_text().partition("<!-- recovery")[2].splitlines()[2:7]
    heading, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme]
    assert rows and {*heading[1:]} == {*names}
    for case, *shown in rows:
        for program, cell in zip(heading[1:], shown, strict=True):
            row = measured.get((case, names[program]))
            if row is None:
                assert cell == _NOTHING
                continue
            kills, lost, median = int(row[2]), int(row[3].split()[0]), row[4] or _NOTHING
            assert cell.replace("*", "") == f"{median} ({kills - lost} of {kills})", (case, program)
