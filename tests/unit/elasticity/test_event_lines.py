"""A log's own fields are its own, and a reader goes on whatever stands in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remesh.dashboard.serve import LiveStory
from remesh.elasticity.telemetry.events import EventLog, EventReader
from remesh.foundation.errors import ConfigError

ODD_LINES = [
    b'{"t": "12 s", "kind": "step", "who": "worker-1", "step": 1}',
    b'{"t": 1e999, "kind": "step", "who": "worker-1", "step": 1}',
    b'{"t": NaN, "kind": "step", "who": "worker-1", "step": 1}',
    b'{"t": null, "kind": "step"}',
    b'{"t": true, "kind": ["step"]}',
    b'{"t": 1' + b"0" * 400 + b', "kind": "step"}',
    b'{"t": 1' + b"0" * 5000 + b', "kind": "step"}',
    b'{"t": 3, "kind": "step", "who": "worker-1", "step": 1e999, "loss": -1e999, "grad": NaN}',
    b'{"t": 3, "kind": "step", "who": "worker-1", "step": 1, "loss": 1e999, "rank": "x"}',
    b'{"t": 3, "kind": "generation", "who": 1e999, "number": 1e999}',
    b"\xff\xfe{}",
    b'{"t": 4, "kind": "\xff"}',
    b"[" * 100_000,
    b'{"t": 4, "kind": "mine", "who": "worker-1", "deep": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"t": 4, "kind": "filled", "who": "worker-1", "generation": 1, "rank": 0, "seconds": 1, "source": "peers", '
    b'"reason": "", "bytes_by_giver": [], "bytes_taken": ' + b"9" * 4299 + b', "bytes_from_disk": 0}',
    b"[]",
    b"17",
    b'"t"',
    b"",
    b"\0\0",
]


@pytest.mark.parametrize("name", ["t", "who"])
def test_fields_of_the_log_are_not_overwritten(tmp_path: Path, name: str) -> None:
    log = EventLog(tmp_path, "worker-1")
    with pytest.raises(ConfigError, match=f"logging 'step': '{name}' is a field of the log itself"):
        log.write("step", **{name: "12 s"})
    log.close()


def test_a_reader_survives_every_line_and_its_view_is_json_for_browsers(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    good = json.dumps({"t": 5.0, "who": "worker-1", "kind": "step", "step": 3, "rank": 0}).encode()
    for count, line in enumerate(ODD_LINES):
        (tmp_path / f"{count}.jsonl").write_bytes(line + b"\n" + line + b"\n" + good + b"\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "nowhere.jsonl").symlink_to(tmp_path / "gone")
    reader = EventReader(tmp_path)
    feed = LiveStory(reader.poll, "job")
    events = reader.poll()
    assert [event for event in events if event.get("step") == 3] == [json.loads(good)] * len(ODD_LINES)
    for event in events:
        feed._story.take(event)
    view = json.loads(feed._render(), parse_constant=refuse)
    assert view["step"] == 3
