"""The page of GPUs says what was run on which device, and nothing else."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from benchmarks.gpu.__main__ import ROWS
from benchmarks.gpu.bench_rank import Compared
from benchmarks.gpu.page import ROOT, UNMET, page_of, read_outcomes, says, what_has_met
from benchmarks.gpu.stand_ins import BAD_INPUT, SHOWN
from tests.gpu.settings import CPU, WITHOUT_TWIN

XML = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_moves" name="test_a[2 ranks over nccl on 2 GPUs]"><skipped/></testcase>
<testcase classname="tests.gpu.test_moves" name="test_b"/>
<testcase classname="tests.gpu.test_saves" name="test_c"><failure message="no"/></testcase>
</testsuite></testsuites>"""

PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_a_test_is_run_unless_it_was_skipped() -> None:
    assert read_outcomes(XML) == {
        "tests/gpu/test_moves.py": [("test_a[2 ranks over nccl on 2 GPUs]", "not run"), ("test_b", "passed")],
        "tests/gpu/test_saves.py": [("test_c", "failed")],
    }


def test_a_page_without_a_device_says_so_and_lists_every_row_and_test() -> None:
    page = page_of(PAGE, {"tests/gpu/test_moves.py": [("test_a[on 2 GPUs]", "not run")]}, None, None)
    assert "**Devices are experimental: no row and no test has met one.**" in page
    assert "| save, GB/s a rank | not run: no GPU |  |  |" in page
    assert "| [`test_a`](../tests/gpu/test_moves.py) | on 2 GPUs | not run |" in page


def report_of(devices: list[str], world_size: int = 8, num_hosts: int = 1) -> dict[str, Any]:
    """A made-up run in which all rows but the last were measured."""
    *measured, last = ROWS
    rows = [vars(Compared(case, 1.5 + n, "dcp", 0.5 + n, "disk", 2.0 + n)) for n, case in enumerate(measured)]
    rows.append(vars(Compared(last, not_run="needs 2 GPUs on the machine of rank 0, found 1")))
    return {"rows": rows, "world_size": world_size, "num_hosts": num_hosts, "devices": devices, "commit": "abc"}


def test_the_page_of_a_made_up_run_has_its_figures() -> None:
    page = page_of(PAGE, read_outcomes(XML), "NVIDIA H100", report_of(["NVIDIA H100"]))
    for line in (
        "**2 of 3 tests, of which 1 failed, were run on NVIDIA H100, 8 of 9 rows were run on 8 x NVIDIA H100.**",
        "On 8 x NVIDIA H100; commit abc.",
        "| save, GB/s a rank | 1.5 | dcp: 0.5 | disk: 2 |",
        "| worker killed to next step, s | not run: needs 2 GPUs on the machine of rank 0, found 1 |  |  |",
        "1 of 3 were not run on a device.",
        "| [`test_a`](../tests/gpu/test_moves.py) | 2 ranks over nccl on 2 GPUs | not run |",
        "| [`test_c`](../tests/gpu/test_saves.py) | GPUs | failed |",
    ):
        assert f"\n{line}\n" in page
    assert page_of(page, read_outcomes(XML), "NVIDIA H100", report_of(["NVIDIA H100"])) == page


@pytest.mark.parametrize(
    ("device", "report", "words"),
    [
        (None, None, ""),
        (None, report_of(["H200"], 1), "8 of 9 rows were run on H200"),
        ("H100", None, "2 of 3 tests, of which 1 failed, were run on H100"),
        (
            "H100",
            report_of(["H100", "H200"], 16, 2),
            "2 of 3 tests, of which 1 failed, were run on H100, 8 of 9 rows were run on 16 x H100, H200 of 2 hosts",
        ),
    ],
)
def test_what_has_met_a_device_is_said_in_one_sentence(
    device: str | None, report: dict[str, Any] | None, words: str
) -> None:
    outcomes = read_outcomes(XML) if device else {"tests/gpu/test_moves.py": [("test_a", "not run")]}
    assert what_has_met(outcomes, device, report) == words


def test_pages_say_that_nothing_was_met_exactly_as_long_as_that_is_so() -> None:
    nothing = "**Devices are experimental: no row and no test has met one.**" in PAGE
    assert {name: says(name, sentence) for name, sentence in UNMET.items()} == dict.fromkeys(UNMET, nothing)


def test_what_is_shown_without_a_device_is_a_test_that_runs_without_one_or_says_so() -> None:
    for one in (*SHOWN, *BAD_INPUT):
        assert (ROOT / "tests" / one.file).is_file()
        assert not one.file.startswith("gpu/") or one.test not in WITHOUT_TWIN or "needs 2 GPUs" in one.by


def test_every_test_of_devices_also_runs_on_the_cpu_or_is_named() -> None:
    alone = set()
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        module = importlib.import_module(f"tests.gpu.{path.stem}")
        for name, test in vars(module).items():
            if name.startswith("test_"):
                marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
                settings = [one.values[0] for mark in marks if mark.args[0] == "setting" for one in mark.args[1]]
                alone |= {name} if CPU not in settings else set()
    assert alone == WITHOUT_TWIN.keys()
    listed = set(re.findall(r"\[`(test_\w+)`\]", (ROOT / "docs" / "gpu.md").read_text()))
    assert alone <= listed
