"""What stays and what goes: policies, and the clearing away that follows them."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh.checkpoint.formats.directory import CONFIG_FNAME, IN_PROGRESS_FNAME
from remesh.checkpoint.plain import latest_complete
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.run.housekeeping import State, decide_removals, list_checkpoints, remove_checkpoint
from remesh.checkpoint.storage import Entry
from remesh.checkpoint.storage.store import LocalStore
from remesh.cli.ckpt import ckpt
from remesh.foundation.errors import ConfigError
from remesh.foundation.retention import KeepBest, KeepEvery, KeepLast, Saved, decide_kept


def saved(*steps: int) -> list[Saved]:
    return [Saved(step, {"loss": abs(step - 25)}) for step in steps]


def test_policies_add_up_and_say_why() -> None:
    kept = decide_kept(saved(10, 20, 30, 40, 50), [KeepLast(2), KeepBest("loss", 1), KeepEvery(40)])
    assert set(kept) == {10, 30, 40, 50}
    assert "loss 5 is among the best 1" in kept[30]
    assert kept[50].startswith("the newest; one of the last 2")


def test_the_newest_stays_whatever_the_policies_say() -> None:
    assert set(decide_kept(saved(10, 20), [KeepBest("unknown", 3)])) == {20}
    assert set(decide_kept(saved(10, 20), [])) == {10, 20}
    assert decide_kept([], [KeepLast(1)]) == {}


def test_best_ignores_nan_and_prefers_the_later_of_equals() -> None:
    values = [Saved(1, {"m": math.nan}), Saved(2, {"m": 5.0}), Saved(3, {"m": 5.0}), Saved(4, {"m": 1.0}), Saved(5)]
    assert set(KeepBest("m", 1, largest=True).kept(values)) == {3}
    assert set(KeepBest("m", 2).kept(values)) == {4, 3}


@pytest.mark.parametrize("make", [lambda: KeepLast(0), lambda: KeepEvery(-1), lambda: KeepBest("m", 0)])
def test_a_policy_of_nothing_is_refused(make: object) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make()  # type: ignore[operator]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 4: complete, aborted, complete, perhaps being written."""
    for step in range(1, 5):
        remesh.save({"w": torch.ones(3), "step": step}, tmp_path / step_name(step))
    for step in (2, 4):
        (tmp_path / step_name(step) / "metadata.json").unlink()
        (tmp_path / step_name(step) / IN_PROGRESS_FNAME).touch()
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_aborted_saves_go_and_what_may_be_running_stays(root: Path) -> None:
    found = list_checkpoints(root)
    assert [one.state for one in found] == [State.COMPLETE, State.UNFINISHED, State.COMPLETE, State.UNFINISHED]
    assert [one.removes for one in decide_removals(found, [])] == [False, True, False, False]
    assert [one.removes for one in decide_removals(found, [KeepLast(1)])] == [True, True, False, False]
    for one in decide_removals(found, [KeepLast(1)]):
        if one.removes:
            assert remove_checkpoint(one.found.directory) == []
    assert sorted(path.name for path in root.iterdir()) == ["notes", step_name(3), step_name(4)]


def test_a_damaged_checkpoint_is_told_and_not_removed(root: Path) -> None:
    (root / step_name(1) / "__0_0.distcp").unlink()
    first = decide_removals(list_checkpoints(root), [KeepLast(1)])[0]
    assert first.found.state is State.DAMAGED
    assert not first.removes
    assert "__0_0.distcp" in first.reason


@pytest.mark.parametrize("when", ["before it is looked at", "while it is looked at"])
@pytest.mark.parametrize("is_gone", [False, True], ids=["half removed", "gone"])
def test_a_checkpoint_that_is_removed_while_it_is_listed_is_neither_damaged_nor_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch, when: str, is_gone: bool
) -> None:
    doomed, entries = root / step_name(1), LocalStore.entries

    def remove() -> None:
        (doomed / IN_PROGRESS_FNAME).touch()
        (doomed / CONFIG_FNAME).unlink(missing_ok=True)
        if is_gone:
            shutil.rmtree(doomed)

    def remove_and_list(store: LocalStore, directory: Path) -> list[Entry]:
        if directory != doomed or not (doomed / CONFIG_FNAME).exists():
            return entries(store, directory)
        if when == "before it is looked at":
            remove()
        found = entries(store, directory)
        remove()
        return found

    monkeypatch.setattr(LocalStore, "entries", remove_and_list)
    found = {one.step: one.state for one in list_checkpoints(root)}
    expected = {2: State.UNFINISHED, 3: State.COMPLETE, 4: State.UNFINISHED}
    assert found == (expected if is_gone else {1: State.UNFINISHED, **expected})


def test_files_of_the_user_survive_a_removal(root: Path) -> None:
    (root / step_name(3) / "notes.txt").write_text("mine")
    assert [path.name for path in remove_checkpoint(root / step_name(3))] == ["notes.txt"]
    assert latest_complete(root) == root / step_name(1)


def test_a_removal_that_dies_leaves_no_half_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink
    num_acts = 0

    def dying(path: Path, missing_ok: bool = False) -> None:
        nonlocal num_acts
        num_acts += 1
        if num_acts > 1:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", dying)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(root / step_name(1))
    monkeypatch.undo()
    assert list_checkpoints(root)[0].state is State.UNFINISHED


def _behind(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_what_lies_behind_a_link_outlives_retention_gc_and_going_back(root: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    shutil.move(root / step_name(1), archive / step_name(1))
    for step in (1, 5):
        (root / step_name(step)).symlink_to(archive / step_name(1))
    before = _behind(archive)
    assert list_checkpoints(root)[0].num_bytes == 0
    assert CliRunner().invoke(ckpt, ["gc", str(root), "--keep-last", "1", "--yes"]).exit_code == 0
    assert not (root / step_name(1)).is_symlink() and (root / step_name(5)).is_symlink()
    assert remesh.Checkpoints(root).drop_after(4) == [5]
    (root / step_name(3)).symlink_to(archive / step_name(1))
    remesh.Checkpoints(root, keep=1).save(6, {"w": torch.zeros(2)})
    assert not (root / step_name(3)).is_symlink() and _behind(archive) == before


def test_what_lies_behind_a_link_within_a_checkpoint_outlives_its_removal(root: Path, tmp_path: Path) -> None:
    arrays = tmp_path / "arrays"
    (arrays / "w").mkdir(parents=True)
    for name in (".zarray", "0.0"):
        (arrays / "w" / name).write_bytes(b"somebody's")
    (root / step_name(3) / "arrays").symlink_to(arrays)
    (root / step_name(3) / "around").symlink_to(root)
    before = _behind(arrays)
    assert [one.state for one in list_checkpoints(root)][2] is State.COMPLETE
    assert sorted(path.name for path in remove_checkpoint(root / step_name(3))) == ["around", "arrays"]
    assert _behind(arrays) == before


def test_a_save_writes_through_no_second_name_of_a_file(root: Path, tmp_path: Path) -> None:
    (root / step_name(4) / IN_PROGRESS_FNAME).unlink()
    (tmp_path / "copy").mkdir()
    data = root / step_name(4) / "__0_0.distcp"
    os.link(data, tmp_path / "copy" / data.name)  # as cp --link makes them
    before = _behind(tmp_path / "copy")
    for path in [*(root / step_name(4)).iterdir()]:
        if path != data:
            path.unlink()
    remesh.save({"w": torch.full((7,), 4.0)}, root / step_name(4))
    assert _behind(tmp_path / "copy") == before


def test_one_folder_that_cannot_be_removed_keeps_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = LocalStore.put

    def refuse(store: LocalStore, path: Path, content: bytes) -> None:
        if path.parent.name == step_name(1):
            raise PermissionError(13, "Permission denied", str(path))
        put(store, path, content)

    monkeypatch.setattr(LocalStore, "put", refuse)
    checkpoints = remesh.Checkpoints(root, keep=1)
    checkpoints.save(5, {"w": torch.zeros(2)})
    assert checkpoints.steps() == [1, 5]
    assert step_name(1) in caplog.text and "Permission denied" in caplog.text
    shutil.copytree(root / step_name(5), root / step_name(6))
    ran = CliRunner().invoke(ckpt, ["gc", str(root), "--keep-last", "1", "--yes"])
    assert ran.exit_code == 1 and "Permission denied" in ran.stderr
    assert checkpoints.steps() == [1, 6]


def test_one_folder_that_may_not_be_read_hides_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = LocalStore.entries

    def refuse(store: LocalStore, directory: Path) -> list[Entry]:
        if directory.name == step_name(1):
            raise PermissionError(13, "Permission denied", str(directory))
        return entries(store, directory)

    monkeypatch.setattr(LocalStore, "entries", refuse)
    remesh.Checkpoints(root, keep=1).save(5, {"w": torch.zeros(2)})
    found = {one.step: one for one in list_checkpoints(root)}
    assert found.keys() == {1, 5}
    assert found[1].state is State.DAMAGED and "may not be read" in found[1].problem


def test_a_broken_save_on_a_read_only_mount_hides_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = root / step_name(4) / f"{IN_PROGRESS_FNAME}.1"
    last.write_text('{"turn": "x", "staged": ["metadata.json"]}')  # ended, and died before the names were given
    (root / step_name(4) / "metadata.json.0").write_text("{}")

    def refuse(*_: object) -> bool:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(LocalStore, "rename", refuse)
    assert latest_complete(root) == root / step_name(3)
    assert [one.step for one in list_checkpoints(root)] == [1, 2, 3, 4]
    assert remesh.Checkpoints(root).steps() == [1, 3]
