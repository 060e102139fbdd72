"""A real cut: the host of the store loses its network, in the middle of a job, and gets it back."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from remesh.testbed import BedSpec, Testbed
from remesh.testbed.local_job import Event, LocalJob
from remesh.testbed.samples import count_samples
from tests.procs.scripts import tiny
from tests.support.certificates import make_tls

pytestmark = pytest.mark.netns

NODES, STEPS, QUIET_S = "abc", 260, 180.0
CUT_S = 4.0
"""How long the cut lasts after the others have gone on, and the one that is cut off has said why it does not."""
_IS_MINORITY = "1 of 3 nodes that may be alive are here"


class BedJob(LocalJob):
    """A node on each host of a testbed; the first hosts the store."""

    def __init__(self, bed: Testbed, folder: Path, flags: Mapping[str, Sequence[str]]) -> None:
        script = [str(Path(tiny.__file__)), "--mesh", "dp=-1", "--steps", str(STEPS), "--full-size", str(len(NODES))]
        super().__init__(folder, script, nnodes=f"1:{len(NODES)}", workers_per_node=1, hosts_store=True)
        self.bed = bed
        self._flags = flags

    def start_node(self, node: str, *options: str) -> None:
        command = [
            *(sys.executable, "-m", "remesh", "run", "--nnodes", self._nnodes, "--nproc-per-node", "1"),
            *("--rdzv-endpoint", f"{self.bed.address_of(NODES[0])}:29500", "--rdzv-id", "cut", "--node-name", node),
            *("--rdzv-host" if node == NODES[0] else "--no-rdzv-host", "--local-addr", self.bed.address_of(node)),
            *("--events-dir", str(self.folder / "events"), "--last-call", "90", "--leave-timeout", "5"),
            *(*self._flags[node], *options, *self._script),
        ]
        with self.log_of(node).open("ab") as log:
            self.agents[node] = self.bed.start_program(node, command, output=log, env={"OMP_NUM_THREADS": "1"})

    def wait_for_step(self, is_it: Callable[[Event], bool]) -> Event:
        return self.wait_for(lambda event: event["kind"] == "step" and is_it(event), QUIET_S)

    def wait_until_told(self, node: str, reason: str) -> None:
        """Until a node has said that it waits, and why: some time after the others are gone.

        It says so after it has missed them all. If it registered first, it watched them all; otherwise it watched the
        first one, and looks at the others only in the meeting that it then opens.
        """

        def is_it(event: Event) -> bool:
            return event["kind"] == "waiting" and event["who"] == who and reason in event["reason"]

        who = self.of_kind("agent", node=node)[0]["who"]
        if not any(map(is_it, self.events)):
            self.wait_for(is_it, QUIET_S)


@pytest.fixture(scope="module")
def bed() -> Testbed:
    with Testbed(BedSpec.parse(",".join(f"{node}=full" for node in NODES))) as made:
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "tls"])
def test_majority_goes_on_without_the_host_of_the_store_which_comes_back_late(
    bed: Testbed, tmp_path: Path, encrypted: bool
) -> None:
    """Three hosts; the one with the store is cut off. It takes no step alone, says why, and joins once it is back."""
    flags: dict[str, list[str]] = {node: [] for node in NODES}
    if encrypted:
        tls = make_tls(tmp_path / "tls")
        files = ["--tls-cert", tls.certificate, "--tls-key", tls.key, "--tls-ca", tls.authority]
        flags = dict.fromkeys(NODES, files)
    with BedJob(bed, tmp_path, flags) as job:
        for node in NODES:
            job.start_node(node)
        job.wait_for_step(lambda event: event["step"] >= 5)
        before = job.of_kind("generation")[0]
        assert before["axes"] == {"dp": 3}
        bed.cut(NODES[0])
        cut_s = time.time()
        job.wait_for_step(lambda event: event["generation"] > before["number"])
        index = job.of_kind("agent", node=NODES[0])[0]["index"]
        moved_to = {event["host"] for event in job.of_kind("store-moved")}
        assert len(moved_to) == 1 and index not in moved_to
        job.wait_until_told(NODES[0], _IS_MINORITY)
        time.sleep(CUT_S)
        bed.mend(NODES[0])
        healed_s = time.time()
        whole = job.wait_for(
            lambda event: event["kind"] == "generation" and event["axes"] == {"dp": 3} and event["t"] > healed_s,
            QUIET_S,
        )
        codes = job.wait(QUIET_S)
        assert codes == dict.fromkeys(NODES, 0), job.describe_logs()
    assert whole["number"] > before["number"] + 1
    lonely = _workers_of(job, NODES[0])
    alone = [e for e in job.of_kind("step") if e["who"] in lonely and cut_s + 1 < e["t"] < healed_s]
    assert not alone, f"the host that was cut off took steps: {alone}"
    _check_one_line(job)


def _has_all(event: Event) -> bool:
    return event["kind"] == "generation" and event["axes"] == {"dp": len(NODES)}


def _workers_of(job: LocalJob, node: str) -> set[str]:
    return {event["who"] for event in job.of_kind("worker") if event["node"] == node}


def _check_one_line(job: LocalJob) -> None:
    """No step was taken by two generations: the job was never split."""
    taken: dict[int, set[int]] = defaultdict(set)
    for event in job.of_kind("step"):
        taken[event["step"]].add(event["generation"])
    assert sorted(taken) == list(range(1, STEPS + 1))
    assert all(len(generations) == 1 for generations in taken.values()), taken
    counted = count_samples([job.events], num_samples=tiny.NUM_SAMPLES, batch_size=tiny.BATCH_SIZE, seed=tiny.SEED)
    assert counted.lost == 0
