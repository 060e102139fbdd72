"""The examples of the guides run as their first lines say, and what they load is what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.forked_programs import run_program

_EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "checkpoint"


@pytest.mark.procs
def test_a_program_of_megatron_core_runs_with_other_imports(tmp_path: Path) -> None:
    said = run_program(_EXAMPLES / "megatron.py", tmp_path)  # ranks may interrupt each other between a line and its end
    assert said.count("weights and Adam's moments are those of the whole model, under TP 4") == 4


@pytest.mark.procs
def test_a_plain_program_goes_on_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    said = run_program(_EXAMPLES / "plain.py", tmp_path)
    losses = {line.split(":")[0]: line.split("losses ")[1] for line in said.splitlines() if line.startswith("mesh")}
    assert set(losses) == {"mesh 2x2, trained", "mesh 2x2, loaded", "mesh 2, loaded"}
    found = [tuple(map(float, text.split(", "))) for text in losses.values()]
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found), losses
