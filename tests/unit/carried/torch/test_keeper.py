"""What a rank's keeper owes the leader of its job, whatever comes in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.carried.torch.rank_keeper import Keeper


class _Line:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def leader() -> _Line:
    return _Line()


@pytest.fixture
def keeper(tmp_path: Path, leader: _Line) -> Iterator[Any]:
    """Of a rank whose program runs."""
    folder = JobFolder.create(tmp_path / "job", JobSpec(("app.py",), 2, "/", {}))
    surround: Any = SimpleNamespace(slot=SimpleNamespace(rank=0), interface="", store=("127.0.0.1", 1))
    surround.channel = tmp_path / "channel"
    line: Any = leader
    made: Any = Keeper(folder, line, surround, ())
    made._program = _Line()
    yield made
    made._callers.close()


def test_a_rank_that_was_told_to_write_answers_also_when_the_checkpoint_is_given_up_before(
    keeper: Any, leader: _Line, tmp_path: Path
) -> None:
    """Another rank found no room on its disk while this one's program was shedding its groups."""
    keeper._obey({"type": "image", "folder": str(tmp_path), "stop": False})
    assert [told["type"] for told in keeper._program.sent] == ["shed"]
    keeper._obey({"type": "end", "ending": "given up", "round": 1, "ended": []})
    assert [told["type"] for told in leader.sent] == ["imaged"]
    keeper._obey({"type": "program", "message": {"type": "shed", "problem": ""}, "line": keeper._program})
    assert [told["type"] for told in leader.sent] == ["imaged"]
    assert not list(tmp_path.glob("rank-*"))
