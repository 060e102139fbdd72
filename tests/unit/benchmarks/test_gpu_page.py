"""The page of GPUs says what was run on which device, and nothing else."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.bench_rank import Compared
from benchmarks.gpu.page import page_of, read_outcomes

XML = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_moves" name="test_a[2 ranks over nccl on 2 GPUs]"><skipped/></testcase>
<testcase classname="tests.gpu.test_moves" name="test_b"/>
<testcase classname="tests.gpu.test_saves" name="test_c"><failure message="no"/></testcase>
</testsuite></testsuites>"""


def test_a_test_is_run_unless_it_was_skipped() -> None:
    assert read_outcomes(XML) == {
        "tests/gpu/test_moves.py": [("test_a[2 ranks over nccl on 2 GPUs]", "not run"), ("test_b", "passed")],
        "tests/gpu/test_saves.py": [("test_c", "failed")],
    }


def test_a_page_without_a_device_says_so_and_lists_every_row_and_test() -> None:
    page = page_of({"tests/gpu/test_moves.py": [("test_a[on 2 GPUs]", "not run")]}, None, None)
    assert "**No row and no test has met a device.**" in page
    assert "| save, GB/s a rank | not run: no GPU | | |" in page
    assert "| [`test_a`](../tests/gpu/test_moves.py) | on 2 GPUs | not run |" in page


def test_a_page_of_a_run_has_its_device_and_its_numbers() -> None:
    rows = [
        vars(Compared("save", 1.5, "dcp", 0.5, "disk", 2.0)),
        vars(Compared("load", not_run="needs 2 ranks, found 1")),
    ]
    report: dict[str, Any] = {"rows": rows, "world_size": 1, "device": "NVIDIA H100", "commit": "abc"}
    page = page_of(read_outcomes(XML), "NVIDIA H100", report)
    assert "2 of 3 tests have met a device: NVIDIA H100." in page
    assert "| save | 1.5 | dcp: 0.5 | disk: 2 |" in page
    assert "| load | not run: needs 2 ranks, found 1 | | |" in page
    assert "No row" not in page
