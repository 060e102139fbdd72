"""A look at a folder that has no logs says what to do."""

from pathlib import Path

from click.testing import CliRunner

from remesh.cli import main


def test_a_folder_without_logs_is_told_with_a_hint(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["top", "--once", str(tmp_path)])
    assert result.exit_code == 0
    assert "no event logs (*.jsonl)" in result.output
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "agent-a.jsonl").touch()
    assert "its folder 'events' has some" in CliRunner().invoke(main, ["top", "--once", str(tmp_path)]).output
    inside = CliRunner().invoke(main, ["top", "--once", str(tmp_path / "events")])
    assert "no event logs" not in inside.output
