"""What the program's end of the line to its keeper says, and when."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from remesh.carried.torch.gate import Gate
from remesh.carried.torch.keeper_line import ControlThread
from remesh.carried.torch.notice import Notice, write_notice


class _Line:
    def __init__(self, *heard: str) -> None:
        self._heard = list(heard)
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message["type"])

    def receive(self) -> Any:
        return {"type": self._heard.pop(0), "wave": 1, "step": "hold", "targets": {}}

    def close(self) -> None:
        pass


def _control(tmp_path: Path, gate: Gate, line: _Line) -> Any:
    place = tmp_path / "channel"
    write_notice(place, Notice(1, ("127.0.0.1", 1), ("127.0.0.1", 2), "00", "growth/", "lo", ()))
    control: Any = ControlThread(gate, 0, place)
    control._line = line
    return control


def test_a_program_that_ends_between_a_cut_and_what_follows_it_stays_until_its_groups_are_grown(tmp_path: Path) -> None:
    gate, line = Gate(), _Line()
    control = _control(tmp_path, gate, line)
    gate.hold({})
    gate.close()
    ending = threading.Thread(target=control.send_goodbye, daemon=True)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive() and not line.sent
    gate.open()
    ending.join(100)
    assert line.sent == ["final"]


def test_a_program_that_has_said_goodbye_leaves_the_answers_to_its_keeper(tmp_path: Path) -> None:
    line = _Line("ask", "ask", "shed")
    control = _control(tmp_path, Gate(), line)
    control.send_goodbye()
    control._obey_until_shed()
    assert line.sent == ["final", "shed"]
