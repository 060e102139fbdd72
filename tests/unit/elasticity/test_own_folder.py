"""Folders of killed agents go with the next one; those of living agents stay."""

from pathlib import Path

import pytest

from remesh.elasticity.own_folder import own_folder


def test_a_folder_whose_owner_was_killed_is_removed_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for count in range(10):  # the kernel has let go of their locks
        (tmp_path / f"remesh-dead{count}").mkdir()
        (tmp_path / f"remesh-dead{count}" / "lock").touch()
    (tmp_path / "remesh-mine").mkdir()  # of somebody else, who knows no lock
    with own_folder() as first, own_folder() as second:
        assert first.is_dir() and second.is_dir()
        assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name, "remesh-mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["remesh-mine"]
