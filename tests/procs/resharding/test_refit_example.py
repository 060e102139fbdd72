"""The example runs as its first lines say, and its generator's logits are the trainer's to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.forked_programs import run_program

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "refit" / "run.py"


@pytest.mark.procs
def test_a_generator_under_another_tensor_parallelism_gives_the_logits_of_the_trainer(tmp_path: Path) -> None:
    said = run_program(EXAMPLE, tmp_path, "--versions", "3", "--steps", "2")
    lines = [line for line in said.splitlines() if line.startswith("version")]
    assert len(lines) == 3
    assert all("logits equal to the last bit on 7 ranks" in line and "1 plan made" in line for line in lines)
