"""Scripts of hosts' guides that are killed and started again: at their end they hold what they hold if never killed.

To the bit, so on the same number of processes. Each host has a test of another number, where sums round otherwise.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hosts.jobs import run_script, stored_tensors

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "integrations"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", ["accelerate_checkpointing.py", "lightning_model_parallel.py", "transformers_trainer.py"]
)
def test_a_killed_job_ends_with_the_bits_of_one_that_was_not(tmp_path: Path, name: str) -> None:
    whole = tmp_path / name
    whole.write_text(re.sub(r"(KILLED_AT.* = \d+, )\d+", r"\g<1>99", (_EXAMPLES / name).read_text()))
    code, output = run_script(_EXAMPLES / name, tmp_path / "killed")
    assert code != 0 and "step 5" in output and "step 6" not in output, output
    for script, folder in ((_EXAMPLES / name, "killed"), (whole, "whole")):
        code, output = run_script(script, tmp_path / folder)
        assert code == 0, output
    found, expected = (stored_tensors(_newest(tmp_path / folder)) for folder in ("killed", "whole"))
    assert found.keys() == expected.keys() and len(expected) > 4
    different = [one for one, tensor in expected.items() if not found[one].equal(tensor)]
    # A loader draws a seed when it begins, in the second job once more; no number of these jobs comes from there.
    assert not [one for one in different if not one.startswith("random.")]


def _newest(folder: Path) -> Path:
    """The checkpoint that was saved last."""
    return max(folder.rglob(".metadata"), key=lambda path: path.stat().st_mtime_ns).parent
