"""The example of the README runs as it is printed, on four ranks."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from remesh.testing.pool import RankPool

_README = Path(__file__).resolve().parents[2] / "README.md"


def _run_example(code: str, folder: str) -> None:
    with contextlib.chdir(folder):
        exec(compile(code, "<example of the README>", "exec"), {"__name__": "readme"})


def test_the_example_runs_as_printed(ranks: RankPool, tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)
    assert example is not None
    # The pool has made the group already; everything else is as printed.
    code, num_inits = re.subn(r"^dist\.init_process_group.*$", "", example.group(1), flags=re.MULTILINE)
    assert num_inits == 1
    ranks.run(_run_example, 4, (code, str(tmp_path)))
    assert any((tmp_path / "checkpoint").iterdir())
