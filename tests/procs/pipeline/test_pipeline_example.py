"""The example runs as its first lines say: cut anew twice, its weights are those of one process to the last bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.procs.forked_programs import run_program

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "pipeline"


@pytest.mark.procs
@pytest.mark.parametrize(
    ("config", "through", "schedule"),
    [
        ("gpt-small", "memory", "eager-split"),
        pytest.param("u-transformer-small", "checkpoint", "1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_job_whose_stages_are_cut_anew_has_the_weights_of_one_process(
    tmp_path: Path, config: str, through: str, schedule: str
) -> None:
    arguments = ["--config", config, "--through", through, "--schedule", schedule]
    said = run_program(EXAMPLE / "run.py", tmp_path, *arguments, "--stages", "2", "1", "4", "--steps", "1")
    told = re.findall(r"rank \d: (\d+) of (\d+) weights equal to the last bit", said)
    assert len(told) == 4 and all(equal == total != "0" for equal, total in told), said
    assert [line.split(",")[0] for line in said.splitlines() if line.startswith("step")] == [
        "step 0: 2 stages",
        "step 1: 1 stages",
        "step 2: 4 stages",
    ]


def test_the_file_has_the_models_of_the_paper() -> None:
    forms = json.loads((EXAMPLE / "configs.json").read_text())
    assert {tuple(form["mesh"]) for name, form in forms.items() if "2.6b" in name} == {(2, 2, 2), (2, 1, 4)}
    assert [forms[f"u-transformer-{size}"]["channels"] for size in ("1b", "2b")] == [480, 672]
