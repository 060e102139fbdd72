"""The examples of hosts that need torch alone run as their first lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs.forked_programs import run_program

_EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "integrations"


@pytest.mark.procs
def test_torchs_recipe_goes_on_with_the_same_losses_on_another_number_of_ranks(tmp_path: Path) -> None:
    said = run_program(_EXAMPLES / "dcp.py", tmp_path)
    trained, loaded = (line.partition("losses ")[2] for line in said.splitlines())
    found = [tuple(map(float, losses.split(", "))) for losses in (trained, loaded)]
    assert found[1] == pytest.approx(found[0], rel=1e-4), said
