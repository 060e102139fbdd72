import errno
import os
from pathlib import Path

import pytest

from remesh.elasticity.telemetry.events import EventLog, EventReader


def test_reader_returns_each_event_once_in_order_of_time(tmp_path: Path) -> None:
    first, second = EventLog(tmp_path, "a"), EventLog(tmp_path, "b")
    reader = EventReader(tmp_path)
    first.write("one", value=1)
    second.write("two")
    first.write("three")
    assert [event["kind"] for event in reader.poll()] == ["one", "two", "three"]
    assert reader.poll() == []
    second.write("four")
    assert [(event["kind"], event["who"]) for event in reader.poll()] == [("four", "b")]


def test_line_cut_by_a_kill_is_passed_over_and_a_growing_one_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"t": 1, "kind": "whole"}\n{"t": 2, "kin\n{"t": 3, "ki')
    reader = EventReader(tmp_path)
    assert [event["kind"] for event in reader.poll()] == ["whole"]
    with path.open("ab") as file:
        file.write(b'nd": "late"}\n')
    assert [event["kind"] for event in reader.poll()] == ["late"]


def test_a_log_that_is_removed_while_logs_are_listed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EventLog(tmp_path, "a").write("one")
    EventLog(tmp_path, "b").write("two")
    glob = Path.glob

    def list_and_remove(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        (tmp_path / "a.jsonl").unlink()
        return found

    monkeypatch.setattr(Path, "glob", list_and_remove)
    assert [event["kind"] for event in EventReader(tmp_path).poll()] == ["two"]


def test_log_without_folder_keeps_nothing(tmp_path: Path) -> None:
    EventLog(None, "a").write("one")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_lines_and_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk of --events-dir is full while the job trains; a metrics server goes on counting."""
    (tmp_path / "agent-0.jsonl").symlink_to("/dev/full")
    counted: list[str] = []
    log = EventLog(tmp_path, "agent-0", lambda event: counted.append(event["kind"]))
    for kind in ("step", "step", "finish"):
        log.write(kind)
    log.close()
    assert counted == ["step", "step", "finish"]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "event log of agent-0 loses lines" in told and "No space left" in told


def test_a_log_that_a_full_disk_does_not_let_be_made_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", refuse)
    EventLog(tmp_path, "worker-7").write("step")
    assert "event log of worker-7 loses lines" in capsys.readouterr().err


def test_a_line_that_was_cut_by_a_full_disk_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = EventLog(tmp_path, "agent-0"), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
        log.write("cut")
    log.write("whole")
    log.close()
    assert [event["kind"] for event in EventReader(tmp_path).poll()] == ["whole"]
