"""``python -m benchmarks.gpu.page``: docs/gpu.md, from a run of the tier of tests, and the report of the benchmark.

Other pages say in a sentence what has met a device. These sentences are written here too (`SAYINGS`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.__main__ import ROWS
from benchmarks.gpu.bench_rank import Compared
from benchmarks.gpu.stand_ins import BAD_INPUT, SHOWN, Shown
from benchmarks.report import OUT
from tests.gpu.settings import WITHOUT_TWIN

ROOT = Path(__file__).resolve().parents[2]
_NOTHING_MET = """\
**No row and no test has met a device.** What a CPU can show [is shown](#shown-without-a-device)."""
_HOW = """\
## How to run it

| machine | tests | rows |
|---|---|---|
| none with a GPU | `make test-gpu`: all skipped, by name | `python -m benchmarks.gpu --device cpu`: small ones |
| one GPU | `make test-gpu` | `python -m benchmarks.gpu` |
| eight GPUs | `make test-gpu` | `torchrun --nproc-per-node 8 -m benchmarks.gpu` |
| two nodes of eight | on each: `make test-gpu` | on each: `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
--rdzv-endpoint HOST:29500 -m benchmarks.gpu --folder /shared` |

A test that needs more GPUs than there are says so; `make test` hides them all. `python -m benchmarks.gpu.page` then
writes this page, and what README says of devices. Groups over NCCL need `torch.cuda.set_device(LOCAL_RANK)` first, or
`device_id`; of torch's settings only those matter that end processes, which [elastic jobs set or
refuse](../src/remesh/device/nccl_settings.py). Memory on devices: `python -m benchmarks.memory --device cuda`."""
Outcomes = dict[str, list[tuple[str, str]]]
"""For each file its tests, each with what became of it."""


@dataclass(frozen=True, slots=True)
class Saying:
    """A sentence of a page, which has one of two forms."""

    before: str
    """As long as nothing has met a device."""
    after: str
    """With ``{met}`` for what has. Invariant: its words are not in ``before``."""

    def put(self, text: str, met: str) -> str:
        """The page with what has met a device; empty for nothing. Raises ValueError unless it has the sentence once."""
        before, *after = (_anyhow_broken(part) for part in (self.before, *self.after.split("{met}")))
        found = list(re.finditer(f"{before}|{r'[^][]*'.join(after)}", text))
        if len(found) != 1:
            raise ValueError(f"found {len(found)} sentences {self.before!r} or {self.after!r}, expected one")
        if not met and re.fullmatch(before, found[0][0]):
            return text
        said = self.after.replace("{met}", met) if met else self.before
        return text[: found[0].start()] + said + text[found[0].end() :]


def _anyhow_broken(words: str) -> str:
    """A pattern for words on as many lines as there may be."""
    return r"\s+".join(map(re.escape, re.split(" +", words)))


SAYINGS = {
    "README.md": Saying(
        "the code for NCCL and CUDA [has not been run on a GPU](docs/gpu.md).",
        "for NCCL and CUDA [{met}](docs/gpu.md).",
    ),
    "docs/index.md": Saying(
        "The code for NCCL and CUDA has not been run on a GPU: [what has, test by test](gpu.md).",
        "For NCCL and CUDA {met}: [test by test](gpu.md).",
    ),
    "docs/elastic/index.md": Saying(
        "That code [has not been run on GPUs](../gpu.md).", "With GPUs [{met}](../gpu.md)."
    ),
}
"""By page."""


def main() -> None:
    """Run the tier, and write the page."""
    report = OUT / "gpu.json"
    outcomes = run_tier()
    told = json.loads(report.read_text()) if report.exists() else None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    (ROOT / "docs" / "gpu.md").write_text(page_of(outcomes, device, told))
    for name, saying in SAYINGS.items():
        page = ROOT / name
        page.write_text(saying.put(page.read_text(), what_has_met(outcomes, device, told)))
    print(f"written to docs/gpu.md, with a sentence in {', '.join(SAYINGS)}")


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


def page_of(outcomes: Outcomes, device: str | None, report: Mapping[str, Any] | None) -> str:
    """The page as text."""
    lines = ["# What has met a GPU", "", "*Written by `python -m benchmarks.gpu.page`; do not edit.*", ""]
    met = what_has_met(outcomes, device, report)
    lines += [f"{met}." if met else _NOTHING_MET, "", _HOW, "", "## Rows", ""]
    lines += _rows(report)
    num_not_met = sum(end == "not run" for tests in outcomes.values() for _, end in tests)
    lines += ["", "## Tests", "", f"{num_not_met} of {sum(map(len, outcomes.values()))} were not run on a device.", ""]
    lines += ["Each also runs on the CPU, in `make test`, but for:", ""]
    lines += [f"- `{name}`: {why}" for name, why in sorted(WITHOUT_TWIN.items())]
    lines += ["", "| test | on | end |", "|---|---|---|"]
    for path, tests in sorted(outcomes.items()):
        for name, end in tests:
            plain, _, setting = name.partition("[")
            lines.append(f"| [`{plain}`](../{path}) | {setting.rstrip(']') or 'GPUs'} | {end} |")
    lines += ["", "## Shown without a device", ""]
    lines += _shown(SHOWN)
    lines += ["", "## Bad input", "", "One clear error on all ranks, unless the row says what happens instead.", ""]
    lines += _shown(BAD_INPUT)
    return "\n".join(lines) + "\n"


def _shown(rows: Sequence[Shown]) -> list[str]:
    lines = ["| what | test | by |", "|---|---|---|"]
    return lines + [f"| {one.what} | [`{one.test}`](../tests/{one.file}) | {one.by} |" for one in rows]


def what_has_met(outcomes: Outcomes, device: str | None, report: Mapping[str, Any] | None) -> str:
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


def _where(report: Mapping[str, Any]) -> str:
    ranks, hosts = report["world_size"], report["num_hosts"]
    each = f"{ranks} x " if ranks > 1 else ""
    return f"{each}{', '.join(report['devices'])}{f' of {hosts} hosts' if hosts > 1 else ''}"


def _rows(report: Mapping[str, Any] | None) -> list[str]:
    if report is None:
        rows, lines = [Compared(case, not_run="no GPU") for case in ROWS], []
    else:
        rows = [Compared(**row) for row in report["rows"]]
        lines = [f"On {_where(report)}; commit {report['commit']}.", ""]
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
