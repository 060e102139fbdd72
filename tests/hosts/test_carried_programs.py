"""Programs of hosts, as their users write them, under `remesh torch`: stopped, restarted elsewhere, equal to the bit.

More stops: ``python -m tests.procs.carried.torch_jobs lightning_trainer.py --steps 600 --stops 20``, and so with the
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.procs.carried.torch_jobs import NEEDS_IMAGES, TorchJob, go_on_and_compare, stop_and_compare

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600), NEEDS_IMAGES]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchJob]:
    made = TorchJob(tmp_path / "job", 2)
    yield made
    made.close()


@pytest.mark.parametrize(
    "script", ["lightning_trainer.py", "accelerate_gpt2.py", "transformers_trainer.py", "fabric.py"]
)
def test_a_program_of_a_host_and_its_workers_go_on_to_the_same_bits(job: TorchJob, script: str) -> None:
    stop_and_compare(job, 2, script, 400, 2, "2")


@pytest.mark.parametrize("script", ["lightning_trainer.py", "accelerate_gpt2.py", "transformers_trainer.py"])
def test_with_a_checkpoint_each_second_a_program_of_a_host_comes_to_the_same_bits(job: TorchJob, script: str) -> None:
    assert go_on_and_compare(job, 2, script, 150, 1.0, "2") >= 2


@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_engine_of_deepspeed_goes_on_to_the_same_bits(job: TorchJob, stage: str) -> None:
    stop_and_compare(job, 2, "deepspeed_zero.py", 100, 2, stage)
