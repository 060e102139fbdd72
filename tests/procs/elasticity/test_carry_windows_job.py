"""A real job that fills a larger mesh by windows."""

from pathlib import Path

import pytest

from tests.procs.elasticity.test_elastic import QUIET_S, checksums, script, sizes
from tests.procs.forked_job import ForkedJob
from tests.support.hold import Hold

pytestmark = [pytest.mark.procs, pytest.mark.slow]
WINDOW_BYTES = 600


def test_a_node_that_joins_gets_its_shards_by_windows(tmp_path: Path) -> None:
    """FSDP on one node; another one comes, and all ranks fill by windows."""
    hold = Hold(tmp_path, 8)
    flags = ("--fsdp", "--window-bytes", str(WINDOW_BYTES), *hold.flags)
    with ForkedJob(tmp_path, script(*flags, steps=40), nnodes="1:2") as job:
        job.start_node("a")
        hold.wait(job, 2, QUIET_S)
        job.start_node("b")
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0, "b": 0}, job.describe_logs()
        assert sizes(job) == [2, 4]
        filled = job.of_kind("filled", generation=2)
        assert len(filled) == 4 and all(event["source"] == "peers" and event["windows"] > 1 for event in filled)
        grown = checksums(job.events)
    (tmp_path / "calm").mkdir()
    with ForkedJob(tmp_path / "calm", script("--pause-s", "0", steps=40), nnodes="1") as job:
        job.start_node("a")
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        assert grown == pytest.approx(checksums(job.events), rel=1e-12)
