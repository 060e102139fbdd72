"""What a rank says of itself to the coordinator of the job."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from remesh.carried.mpi.lower.rank import Ended, RankLoop


class _Control:
    """A line on which the coordinator ends the job as soon as it has heard of a failure."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self._told: deque[dict[str, Any]] = deque()

    def send(self, message: dict[str, Any]) -> None:
        self.said.append(message)
        if message.get("code"):
            self._told.append({"type": "abort", "cause": "a rank has failed"})

    def take(self, timeout_s: float = 0.0) -> dict[str, Any] | None:
        return self._told.popleft() if self._told else None


def _half(calls: list[str]) -> Any:
    def serve_once(timeout_s: float) -> None:
        calls.append("serve")
        raise ProcessLookupError

    return SimpleNamespace(
        serve_once=serve_once, abort_code=None, forget_program=lambda: None, has_been_called=True, finished=False
    )


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (-11, [{"type": "ended", "code": -11, "omitted": "MPI_Finalize"}]),
        (0, [{"type": "ended", "code": 0, "omitted": "MPI_Finalize"}, {"type": "failed", "code": 1}]),
    ],
)
def test_a_program_whose_memory_is_gone_is_told_by_how_it_ended(status: int, told: list[dict[str, Any]]) -> None:
    control, calls = _Control(), list[str]()
    upper: Any = SimpleNamespace(poll=lambda: status)
    room: Any = SimpleNamespace(rank=0)
    line: Any = control
    with pytest.raises(Ended, match="a rank has failed"):
        RankLoop(room, _half(calls), upper, line, ()).run()
    causes = [message.pop("cause", "") for message in control.said]
    assert control.said == told
    assert calls == ["serve"]
    assert status or "ended while another rank was to receive a message from its memory" in causes[-1]
