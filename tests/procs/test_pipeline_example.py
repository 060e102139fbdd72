"""The example runs as its first lines say: cut anew twice, its weights are those of one process to the last bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipeline"


@pytest.mark.procs
@pytest.mark.parametrize(
    ("config", "through", "schedule"),
    [
        ("gpt-small", "memory", "eager-split"),
        pytest.param("u-transformer-small", "checkpoint", "1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_job_whose_stages_are_cut_anew_has_the_weights_of_one_process(
    config: str, through: str, schedule: str
) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE / "run.py"), "--config", config, "--through", through]
    command += ["--schedule", schedule, "--stages", "2", "1", "4", "--steps", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    told = re.findall(r"rank \d: (\d+) of (\d+) weights equal to the last bit", run.stdout)
    assert len(told) == 4 and all(equal == total != "0" for equal, total in told), run.stdout
    assert [line.split(",")[0] for line in run.stdout.splitlines() if line.startswith("step")] == [
        "step 0: 2 stages",
        "step 1: 1 stages",
        "step 2: 4 stages",
    ]


def test_the_file_has_the_models_of_the_paper() -> None:
    forms = json.loads((EXAMPLE / "configs.json").read_text())
    assert {tuple(form["mesh"]) for name, form in forms.items() if "2.6b" in name} == {(2, 2, 2), (2, 1, 4)}
    assert [forms[f"u-transformer-{size}"]["channels"] for size in ("1b", "2b")] == [480, 672]
