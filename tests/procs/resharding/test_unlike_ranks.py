"""A program that calls Remesh with other arguments on one rank ends at once, with their name and both values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.forked_job import ForkedJob

pytestmark = [pytest.mark.procs, pytest.mark.slow]  # the comparisons themselves are in tests/unit/elasticity
QUIET_S = 90.0
PROGRAM = """
import os
import torch
import remesh

is_odd = os.environ["REMESH_SLOT"] == "1"

def train(job):
    model = torch.nn.Linear(2, %(width)r if is_odd else 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    job.carry(model=model, **({} if %(lacks)r and is_odd else {"optim": optim}))
    for _ in job.batches(range(12), **({"batch_size": 4} | (%(batches)r if is_odd else {}))):
        job.log("step")
        job.commit()

remesh.elastic(train, {"dp": -1}, **(%(elastic)r if is_odd else {}))
"""


@pytest.mark.parametrize(
    ("unlike", "code", "words"),
    [
        ({"elastic": {"seed": 7}}, 2, "seed is 0 on worker 0 of a and 7 on worker 1 of a"),
        ({"elastic": {"snapshot_every": 2}}, 2, "snapshot_every is None on worker 0 of a and 2 on worker 1 of a"),
        ({"lacks": True}, 1, "'optim' is an optimizer on rank 0 and missing on rank 1"),
        ({"width": 3}, 1, "'model.bias' has global shape (2,) where rank 0 wants it but (3,) where rank 1 wants it"),
        ({"batches": {"batch_size": 6}}, 1, "batch_size is 4 on rank 0 and 6 on rank 1"),
        ({"batches": {"max_steps": 0}}, 1, "max_steps is None on rank 0 and 0 on rank 1"),
    ],
    ids=["seed", "snapshot_every", "carry", "shape", "batch_size", "max_steps"],
)
def test_arguments_that_differ_on_one_rank_end_the_job_at_its_first_meeting_or_step(
    tmp_path: Path, unlike: dict[str, object], code: int, words: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM % ({"elastic": {}, "lacks": False, "width": 2, "batches": {}} | unlike))
    with ForkedJob(tmp_path, [str(script)], nnodes="1") as job:
        job.start_node("a")
        assert job.wait(QUIET_S) == {"a": code}, job.describe_logs()
        assert words in job.describe_logs()
        assert len(job.of_kind("generation")) <= 1
