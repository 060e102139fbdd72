"""``python -m benchmarks.gpu.page``: the figures of docs/gpu.md, from a run of the tier of tests, and a report.

Other pages say in a sentence that nothing has met a device, as long as that is so (`UNMET`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.__main__ import ROWS
from benchmarks.gpu.bench_rank import Compared
from benchmarks.gpu.stand_ins import BAD_INPUT, SHOWN, Shown
from benchmarks.page import Report, check_commit, fill_places, table
from benchmarks.report import OUT
from tests.gpu.settings import WITHOUT_TWIN

ROOT = Path(__file__).resolve().parents[2]
_NOTHING_MET = "Devices are experimental: no row and no test has met one"
Outcomes = dict[str, list[tuple[str, str]]]
"""For each file its tests, each with what became of it."""


UNMET = {
    "README.md": "the code for NCCL and CUDA [has not been run on a GPU](docs/gpu.md)",
    "docs/index.md": "The code for NCCL and CUDA has not been run on a GPU",
    "docs/elastic/index.md": "That code [has not been run on GPUs](../gpu.md)",
}
"""By page, what it says as long as nothing has met a device."""


def main() -> None:
    """Run the tier, and write the page."""
    report = OUT / "gpu.json"
    outcomes = run_tier()
    told = json.loads(report.read_text()) if report.exists() else None
    if told is not None:
        check_commit(told, "writing docs/gpu.md")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    page = ROOT / "docs" / "gpu.md"
    page.write_text(page_of(page.read_text(), outcomes, device, told))
    print("written to docs/gpu.md")
    if what_has_met(outcomes, device, told):
        print("to be changed by hand:", *(f"{name}: {said!r}" for name, said in UNMET.items() if says(name, said)))


def says(name: str, sentence: str) -> bool:
    """Whether a page has a sentence, on as many lines as there may be."""
    return sentence in " ".join((ROOT / name).read_text().split())


def run_tier() -> Outcomes:
    """Every test of the tier, by what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", f"--junit-xml={path}"]
        subprocess.run(command, cwd=ROOT, check=False)
        return read_outcomes(path.read_text())


def read_outcomes(xml: str) -> Outcomes:
    """What pytest wrote of its tests."""
    found: Outcomes = defaultdict(list)
    for case in ET.fromstring(xml).iter("testcase"):
        ends = {child.tag: child.get("message", "") for child in case}
        came = "failed" if {"failure", "error"} & ends.keys() else "not run" if "skipped" in ends else "passed"
        found[case.get("classname", "").replace(".", "/") + ".py"].append((case.get("name", ""), came))
    return dict(found)


def page_of(text: str, outcomes: Outcomes, device: str | None, report: Report | None) -> str:
    """The text of the page, with other figures."""
    ends = [end for tests in outcomes.values() for _, end in tests]
    lines = []
    for path, tests in sorted(outcomes.items()):
        for name, end in tests:
            plain, _, setting = name.partition("[")
            lines.append([f"[`{plain}`](../{path})", setting.rstrip("]") or "GPUs", end])
    return fill_places(
        text,
        {
            "met": [f"**{what_has_met(outcomes, device, report) or _NOTHING_MET}.**"],
            "rows": _rows(report),
            "not run": [f"{ends.count('not run')} of {len(ends)} were not run on a device."],
            "alone": [f"- `{name}`: {why}" for name, why in sorted(WITHOUT_TWIN.items())],
            "tests": table(["test", "on", "end"], lines),
            "shown": _shown(SHOWN),
            "bad input": _shown(BAD_INPUT),
        },
        "docs/gpu.md",
    )


def _shown(rows: Sequence[Shown]) -> list[str]:
    lines = [[one.what, f"[`{one.test}`](../tests/{one.file})", one.by] for one in rows]
    return table(["what", "test", "by"], lines)


def what_has_met(outcomes: Outcomes, device: str | None, report: Report | None) -> str:
    """How many tests and rows have met which device, in words; empty for none."""
    ends = [end for tests in outcomes.values() for _, end in tests]
    num_met, num_failed = sum(end != "not run" for end in ends), ends.count("failed")
    rows = [] if report is None else [Compared(**row) for row in report["rows"]]
    num_rows = sum(not row.not_run for row in rows)
    said = []
    if num_met:
        failed = f", of which {num_failed} failed," if num_failed else ""
        said.append(f"{num_met} of {len(ends)} tests{failed} were run on {device}")
    if num_rows and report is not None:
        said.append(f"{num_rows} of {len(ROWS)} rows were run on {_where(report)}")
    return ", ".join(said)


def _where(report: Report) -> str:
    ranks, hosts = report["world_size"], report["num_hosts"]
    each = f"{ranks} x " if ranks > 1 else ""
    return f"{each}{', '.join(report['devices'])}{f' of {hosts} hosts' if hosts > 1 else ''}"


def _rows(report: Report | None) -> list[str]:
    if report is None:
        rows, about = [Compared(case, not_run="no GPU") for case in ROWS], []
    else:
        rows = [Compared(**row) for row in report["rows"]]
        about = [f"On {_where(report)}; commit {report['commit']}.", ""]
    lines = []
    for row in rows:
        if row.not_run:
            lines.append([row.case, f"not run: {row.not_run}", "", ""])
        else:
            beside, limit = f"{row.peer}: {row.peer_value:.3g}", f"{row.bound}: {row.bound_value:.3g}"
            lines.append([row.case, f"{row.value:.3g}", beside, limit])
    return about + table(["row", "Remesh", "beside", "limit"], lines)


if __name__ == "__main__":
    main()
