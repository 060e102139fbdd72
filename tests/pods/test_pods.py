"""The shipped Job lives on when its pods are evicted, lost and created again; it ends as the training does."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pods import After, PodCluster

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which kubernetes-validate brings")
pytestmark = [pytest.mark.pods, pytest.mark.timeout(900)]
MANIFEST = Path(__file__).parents[2] / "examples" / "deploy" / "kubernetes.yaml"
TRAINING = Path(__file__).with_name("training.py")
NUM_EVICTIONS = int(os.environ.get("REMESH_POD_EVICTIONS", "4"))
"""Before a release: 200, which takes an hour or two on two cores."""
_STEP_S = 240.0
"""Until the job has gone a step on; a busy machine starts a Python with torch in a minute."""


def _cluster(folder: Path) -> PodCluster:
    """The shipped Job, with one process for each pod, a folder for /shared, and our training."""
    _, job = yaml.safe_load_all(MANIFEST.read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["remesh", "run"] and container["args"][-1] == "train.py"
    args = [re.sub(r"^--nproc-per-node=.*", "--nproc-per-node=1", word) for word in container["args"][:-1]]
    args = [word.replace("/shared", str(folder)) for word in args]
    return PodCluster(job, folder, [*args, str(TRAINING), str(folder)])


def _last_step(cluster: PodCluster, world: int | None = None) -> Callable[[int], int]:
    """By index, the last step that its pod of now has told, of a world of that size."""

    def last(index: int) -> int:
        if index not in cluster.pods:
            return -1
        told = re.findall(r"^STEP (\d+) world (\d+)$", cluster.pods[index].log.read_text(errors="replace"), re.M)
        steps = [int(step) for step, size in told[-1:] if world is None or int(size) == world]
        return steps[-1] if steps else -1

    return last


def _wait_for_steps(cluster: PodCluster, what: str, *, above: int = 0) -> None:
    """All four pods are in one world, and have gone beyond a step."""
    last = _last_step(cluster, world=4)
    cluster.wait_until(lambda: all(last(index) > above for index in range(4)) or cluster.is_over, _STEP_S, what)
    assert not cluster.is_over, f"{what}: the Job is over\n{cluster.story()}"


def _finish(cluster: PodCluster, folder: Path) -> None:
    (folder / "finish").touch()
    cluster.wait_until(lambda: cluster.is_over, 2 * _STEP_S, "all are at the last step")
    assert set(cluster.over.values()) == {After.SUCCEEDED}, cluster.story()


@pytest.mark.parametrize("index", [0, 2])
def test_an_evicted_pod_hands_over_and_its_index_comes_back(tmp_path, index):
    with _cluster(tmp_path) as cluster:
        _wait_for_steps(cluster, "the first steps", above=5)
        before = max(map(_last_step(cluster), range(4)))
        cluster.evict(index)
        cluster.wait_until(lambda: bool(cluster.ended), _STEP_S, "the evicted pod leaves")
        assert cluster.ended == [(index, 80, After.AGAIN)], cluster.story()
        _wait_for_steps(cluster, "the index is back", above=before)
        _finish(cluster, tmp_path)


@pytest.mark.parametrize("index", [0, 3])
def test_a_pod_whose_node_is_lost_comes_back(tmp_path, index):
    with _cluster(tmp_path) as cluster:
        _wait_for_steps(cluster, "the first steps", above=25)
        before = max(map(_last_step(cluster), range(4)))
        cluster.lose_node(index)
        cluster.wait_until(lambda: bool(cluster.ended), _STEP_S, "the pod is gone")
        _wait_for_steps(cluster, "the index is back", above=before)
        _finish(cluster, tmp_path)


def test_a_job_whose_pods_are_all_evicted_goes_on_from_its_checkpoint(tmp_path):
    with _cluster(tmp_path) as cluster:
        _wait_for_steps(cluster, "the first steps", above=25)
        for index in range(4):
            cluster.evict(index)
        cluster.wait_until(lambda: len(cluster.ended) >= 4, _STEP_S, "all leave")
        assert {code for _, code, _ in cluster.ended} <= {80, 81}, cluster.story()
        _wait_for_steps(cluster, "all are back, behind the checkpoint", above=20)
        _finish(cluster, tmp_path)


def test_an_error_of_the_training_fails_the_job(tmp_path):
    with _cluster(tmp_path) as cluster:
        cluster.job["spec"]["backoffLimitPerIndex"] = 0
        _wait_for_steps(cluster, "the first steps", above=5)
        (tmp_path / "raise").touch()
        cluster.wait_until(lambda: cluster.is_over, _STEP_S, "the Job has failed")
        assert After.SUCCEEDED not in cluster.over.values()
        assert not {0, 80, 81} & {code for _, code, after in cluster.ended if after is not After.JOB_FAILED}


def _disturb(cluster: PodCluster, chance: random.Random) -> list[tuple[int, int, After]]:
    """Evict or lose one or two pods, and wait until they have ended; how they did."""
    num_ended, chosen = len(cluster.ended), chance.sample(range(4), chance.choice([1, 1, 1, 2]))
    for index in chosen:
        chance.choice([cluster.evict, cluster.evict, cluster.lose_node])(index)
    cluster.wait_until(lambda: len(cluster.ended) >= num_ended + len(chosen), _STEP_S, f"pods {chosen} have ended")
    return cluster.ended[num_ended:]


def test_random_evictions_and_losses_end_with_a_job_that_succeeds(tmp_path):
    chance = random.Random(int(os.environ.get("REMESH_POD_SEED", "0")))
    with _cluster(tmp_path) as cluster:
        _wait_for_steps(cluster, "the first steps", above=25)
        for number in range(NUM_EVICTIONS):
            before = max(map(_last_step(cluster), range(4)))
            print(f"disturbance {number} at step {before}: {_disturb(cluster, chance)}", flush=True)
            _wait_for_steps(cluster, f"all are back after disturbance {number}", above=before)
        _finish(cluster, tmp_path)
