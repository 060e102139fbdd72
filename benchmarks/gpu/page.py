"""``python -m benchmarks.gpu.page``: docs/gpu.md, from a run of the tier of tests, and the report of the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.__main__ import ROWS
from benchmarks.gpu.bench_rank import Compared
from benchmarks.report import OUT

ROOT = Path(__file__).resolve().parents[2]
_NOTHING_MET = """\
**No row and no test has met a device.** What a CPU can show is shown: nearly all of these tests also run on the CPU, in
`make test`, and the waits between streams are tried on a device that is made believe
([decision 88](decisions/0088-device-memory-is-copied-in-a-queue.md))."""
Outcomes = dict[str, list[tuple[str, str]]]
"""For each file its tests, each with what became of it."""


def main() -> None:
    """Run the tier, and write the page."""
    report = OUT / "gpu.json"
    outcomes = run_tier()
    told = json.loads(report.read_text()) if report.exists() else None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    (ROOT / "docs" / "gpu.md").write_text(page_of(outcomes, device, told))
    print("written to docs/gpu.md")


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


def page_of(outcomes: Outcomes, device: str | None, report: dict[str, Any] | None) -> str:
    """The page as text."""
    all_ends = [end for tests in outcomes.values() for _, end in tests]
    num_met = sum(end != "not run" for end in all_ends)
    lines = ["# What has met a GPU", "", "*Written by `python -m benchmarks.gpu.page`; do not edit.*", ""]
    lines += [_NOTHING_MET if not num_met and report is None else _some_met(num_met, len(all_ends), device), ""]
    lines += [
        "## Rows",
        "",
        "`python -m benchmarks.gpu`, or under torchrun; `--device cpu` for small ones.",
        "",
    ]
    lines += _rows(report)
    lines += ["", "## Tests", "", "`make test-gpu`. A test for more GPUs than there are says so.", ""]
    lines += ["| test | on | end |", "|---|---|---|"]
    for path, tests in sorted(outcomes.items()):
        for name, end in tests:
            plain, _, setting = name.partition("[")
            lines.append(f"| [`{plain}`](../{path}) | {setting.rstrip(']') or 'GPUs'} | {end} |")
    return "\n".join(lines) + "\n"


def _some_met(num_met: int, num_all: int, device: str | None) -> str:
    return f"{num_met} of {num_all} tests have met a device: {device or 'none in this run'}."


def _rows(report: dict[str, Any] | None) -> list[str]:
    if report is None:
        rows, lines = [Compared(case, not_run="no GPU") for case in ROWS], []
    else:
        rows = [Compared(**row) for row in report["rows"]]
        lines = [f"{report['world_size']} ranks, {report['device']}, commit {report['commit']}.", ""]
    lines += ["| row | Remesh | beside | limit |", "|---|---|---|---|"]
    for row in rows:
        if row.not_run:
            lines.append(f"| {row.case} | not run: {row.not_run} | | |")
        else:
            beside, limit = f"{row.peer}: {row.peer_value:.3g}", f"{row.bound}: {row.bound_value:.3g}"
            lines.append(f"| {row.case} | {row.value:.3g} | {beside} | {limit} |")
    return lines


if __name__ == "__main__":
    main()
