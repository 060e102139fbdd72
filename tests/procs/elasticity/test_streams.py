"""Loaders with workers, read as ranks read them, and jobs whose loaders shuffle by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from remesh.elasticity.training.sample_stream import Stream
from remesh.elasticity.typed_values import decode, encode
from remesh.testbed.samples import samples_taken
from tests.procs.forked_job import ForkedJob
from tests.procs.scripts import tiny
from tests.support.hold import Hold

pytestmark = [
    pytest.mark.procs,
    pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning"),  # torchdata asks torch for all its names
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
LENGTH = 11
SCRIPT = str(Path(tiny.__file__))
QUIET_S = 90.0


class Divided(torch.utils.data.IterableDataset[int]):
    """Each worker of the loader has a part, in an order that it draws itself."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        part = range(worker.id, LENGTH, worker.num_workers)
        return iter([part[index] for index in torch.randperm(len(part)).tolist()])


def torchs(**options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(list(range(LENGTH)), batch_size=None, shuffle=True, **options)  # type: ignore[arg-type]


def torchdatas(**options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata, of the extra test")
    return module.StatefulDataLoader(list(range(LENGTH)), batch_size=None, shuffle=True, **options)


LOADERS = {
    "workers": torchs(num_workers=2),
    "workers that stay": torchs(num_workers=2, persistent_workers=True),
    "an iterable over workers": lambda: DataLoader(Divided(), batch_size=None, num_workers=2),
    "torchdata's workers": lambda: torchdatas(num_workers=2),
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=[] if name == "workers" else [pytest.mark.slow], id=name)
        for name, make in LOADERS.items()
    ],
)
def test_ranks_read_a_loader_with_workers_in_one_order(make: Callable[[], Any]) -> None:
    """Two ranks with other random states, and one that comes in the second epoch by the carried state."""
    streams = []
    found: list[int] = []
    for position in range(0, 3 * LENGTH, 3):
        if position in (0, 15):
            for _ in range(2 if position == 0 else 1):
                torch.manual_seed(0)  # as every rank enters ``train``
                streams.append(Stream(make()))
        if position == 15:
            streams[-1].load_state_dict(decode(encode("stream", streams[0].state_dict())))
        batches = []
        for rank, stream in enumerate(streams):
            torch.manual_seed(1000 * rank + position)
            batches.append([int(sample) for sample in stream.take(position, 3, 3, seed=7)])
        assert all(batch == batches[0] for batch in batches), (position, batches)
        found += batches[0]
    assert Counter(found) == Counter(list(range(LENGTH)) * 3)
    assert found[:LENGTH] != found[LENGTH : 2 * LENGTH]


@pytest.mark.slow  # what each rank reads is above, and a death among samples is in test_elastic
def test_a_job_reads_a_shuffling_loader_without_losing_or_repeating_samples(tmp_path: Path) -> None:
    """torch's DataLoader with shuffle=True, six epochs on two ranks, one of which is killed and replaced."""
    steps = 25
    assert steps * tiny.BATCH_SIZE == 6 * tiny.NUM_SAMPLES
    hold = Hold(tmp_path, 7)
    command = [SCRIPT, "--mesh", "dp=-1", "--steps", str(steps), "--stream", "loader", "--full-size", "2", *hold.flags]
    with ForkedJob(tmp_path, command, nnodes="1") as job:
        job.start_node("a")
        hold.wait(job, 2, QUIET_S)
        job.kill_worker("a", 1)
        hold.end()
        assert job.wait(QUIET_S) == {"a": 0}, job.describe_logs()
        taken = samples_taken(job.events)
        order = [index for step in sorted(taken) for index in sorted(taken[step])]
        assert Counter(order) == Counter(list(range(tiny.NUM_SAMPLES)) * 6)


def test_a_job_whose_loader_has_an_order_of_its_own_on_each_rank_ends_before_its_first_step(tmp_path: Path) -> None:
    command = [SCRIPT, "--mesh", "dp=-1", "--steps", "3", "--stream", "own-order"]
    with ForkedJob(tmp_path, command, nnodes="1") as job:
        job.start_node("a")
        assert job.wait(QUIET_S) == {"a": 1}, job.describe_logs()
        assert not job.of_kind("step")
        assert "ranks did not read the same samples in the same order" in job.describe_logs()
        assert "read DataLoader with a OwnOrder" in job.describe_logs()
