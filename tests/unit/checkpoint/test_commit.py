"""A save that is stopped anywhere leaves nothing that a reader takes for a checkpoint, and the next save succeeds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remesh import dist_checkpointing
from remesh.checkpoint.formats.directory import IN_PROGRESS_FNAME
from remesh.checkpoint.plain import load, save
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.run.housekeeping import latest_complete
from remesh.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, maybe_load_config, save_config
from remesh.foundation.errors import FormatError, StorageError


class Killed(BaseException):
    """Stands for SIGKILL: no handler of errors may hold it up."""


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the process die at the ``step``-th act on the file system that matters."""
    num_acts = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_acts
            num_acts += 1
            if num_acts == step:
                raise Killed
            return act(*args, **kwargs)

        return acting

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    for name in ("replace", "unlink", "touch", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((4, 3), value), "step": int(value)}


def test_a_save_that_dies_at_any_step_is_invisible_and_can_be_repeated(tmp_path: Path) -> None:
    save(state(1), tmp_path / step_name(1))
    for step in itertools.count(1):
        target = tmp_path / step_name(1 + step)
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, step)
            try:
                save(state(2), target)
            except Killed:
                pass
            else:
                break
        if dist_checkpointing.check_is_distributed_checkpoint(target):
            # Only what comes after the commit may die and leave a checkpoint: it must be a whole one.
            assert load(state(0), target)["step"] == 2
        else:
            assert latest_complete(tmp_path) == tmp_path / step_name(step)
            if target.exists():
                with pytest.raises(FormatError):
                    load(state(0), target)
            save(state(3), target)
            loaded = load(state(0), target)
            assert loaded["step"] == 3
            assert loaded["w"].eq(3).all()
            assert not (target / IN_PROGRESS_FNAME).exists()
    assert step > 10, "a save has at least ten steps at which it may die"


def test_nothing_is_written_over_a_complete_checkpoint(tmp_path: Path) -> None:
    save(state(1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StorageError, match="already holds a complete checkpoint"):
        save(state(2), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_is_written_over_a_checkpoint_of_native_torch(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"someone else's")
    with pytest.raises(StorageError, match="native torch"):
        save(state(2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


def test_files_of_the_user_survive_in_the_directory(tmp_path: Path) -> None:
    for name in ("notes.txt", "__main__.py", "config.json", "__7_1.distcp"):
        (tmp_path / name).write_text("mine")
    save(state(1), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"notes.txt", "__main__.py", "config.json"} < names
    assert "__7_1.distcp" not in names, "data of an incomplete save is a leftover"


def test_sharded_saves_want_the_directory_and_plain_ones_make_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="does not exist"):
        dist_checkpointing.save({"a": 1}, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    save({"a": 1}, tmp_path / "new" / "deep")
    assert load({}, tmp_path / "new" / "deep") == {"a": 1}


def test_a_file_in_the_place_of_the_directory_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(StorageError, match="it is a file"):
        save({"a": 1}, path)
    with pytest.raises(StorageError, match=str(path)):
        save({"a": 1}, path / "below")


def test_an_error_of_the_system_is_told_as_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=f"saving checkpoint {tmp_path}.*No space left"):
        save(state(1), tmp_path)


def test_latest_complete_passes_over_what_is_not_whole(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "nowhere") is None
    assert latest_complete(tmp_path) is None
    for step in (2, 10, 30, 100_000_000):
        save(state(step), tmp_path / step_name(step))
    save(state(1), tmp_path / "best")
    assert latest_complete(tmp_path) == tmp_path / "step-100000000"
    (tmp_path / step_name(100_000_000) / "metadata.json").unlink()
    data = tmp_path / step_name(30) / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    assert latest_complete(str(tmp_path)) == tmp_path / step_name(10)


def test_the_marker_has_the_four_known_fields_and_ignores_later_ones(tmp_path: Path) -> None:
    save_config(CheckpointingConfig("torch_dist"), tmp_path)
    assert (tmp_path / "metadata.json").read_text() == (
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
        '"common_backend_version": 1}'
    )
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "x", "sharded_backend_version": 3, "new": 1}')
    assert maybe_load_config(tmp_path) == CheckpointingConfig("x", 3)
    assert maybe_load_config(None) is None
    assert maybe_load_config("") is None
