"""Ranks over gloo tell each other values of any length, also where no device of CUDA is."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from remesh.comm import word_tree
from remesh.comm.gather import all_gather_json
from remesh.testbed.pool import RankPool

pytestmark = pytest.mark.procs


def _tell(lengths: list[int]) -> list[str]:
    return all_gather_json("x" * lengths[dist.get_rank()])


@pytest.mark.parametrize("lengths", [[0, 5, 1], [300_000, 0, 7], [1, 70_000, 2_000_000], [5_000, 5_000, 5_000]])
def test_values_of_any_length_are_heard_by_all(ranks: RankPool, lengths: list[int]) -> None:
    assert ranks.run(_tell, 3, (lengths,)) == [["x" * length for length in lengths]] * 3


class _Notes(logging.Handler):
    """Writes what is logged into a file, which others wait for."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        self._file.with_suffix(".new").write_text(record.getMessage())
        self._file.with_suffix(".new").replace(self._file)


def _come_late(folder: str) -> list[int]:
    file = Path(folder) / "named"
    if dist.get_rank() == 0:
        notes = _Notes(file)
        word_tree.logger.addHandler(notes)
        try:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(word_tree, "_GRACE_S", 0.1)
                return all_gather_json(0)
        finally:
            word_tree.logger.removeHandler(notes)
    deadline_s = time.monotonic() + 120
    while not file.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return all_gather_json(dist.get_rank())


def test_ranks_that_do_not_come_are_named_while_the_others_wait(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_come_late, 3, (str(tmp_path),)) == [[0, 1, 2]] * 3
    named = (tmp_path / "named").read_text()
    assert "rank 0 has waited" in named and "for ranks 1, 2" in named and "call it on every rank" in named
