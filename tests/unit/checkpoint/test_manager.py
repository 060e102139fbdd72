"""A run's checkpoints in one process: which is the newest, which stay, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError, CheckpointPathError
from remesh.checkpoint.plan.step_names import step_name
from remesh.foundation.errors import ConfigError
from remesh.foundation.options import OptionError
from remesh.foundation.retention import KeepEvery, KeepLast

both = pytest.mark.parametrize("background", [False, True], ids=["in front", "behind"])


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3, 2), float(step)), "step": step}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@both
def test_the_newest_is_loaded_and_the_oldest_go(tmp_path: Path, background: bool) -> None:
    with remesh.Checkpoints(tmp_path / "run", keep=2, background=background) as checkpoints:
        assert checkpoints.latest() is None and checkpoints.steps() == []
        for step in (1, 5, 7):
            assert checkpoints.save(step, state(step)).result() == tmp_path / "run" / step_name(step)
    assert names(tmp_path / "run") == [step_name(5), step_name(7)]
    again = remesh.Checkpoints(tmp_path / "run", keep=2)
    assert again.latest() == 7 and again.steps() == [5, 7]
    wanted = state(0)
    assert again.load(wanted)["step"] == 7 and wanted["w"].eq(7).all()
    assert again.load(wanted, 5)["step"] == 5 and wanted["w"].eq(5).all()


@both
def test_values_are_those_of_the_call(tmp_path: Path, background: bool) -> None:
    changing = state(1)
    saved = remesh.save(changing, tmp_path / "c", background=background)
    changing["w"].fill_(-1)
    wanted = state(0)
    assert remesh.load(wanted, saved.result())["step"] == 1
    assert wanted["w"].eq(1).all()


def test_more_saves_than_hold_copies_at_once_all_come_to_be(tmp_path: Path) -> None:
    saves = [remesh.save(state(step), tmp_path / str(step), background=True) for step in range(6)]
    assert [saved.result() for saved in saves] == [tmp_path / str(step) for step in range(6)]
    assert [remesh.load(state(0), saved.result())["step"] for saved in saves] == list(range(6))


@pytest.mark.parametrize(
    ("keep", "left"),
    [(None, [0, 1, 2, 3, 4]), ([KeepLast(1), KeepEvery(3)], [0, 3, 4]), (1, [4])],
    ids=["all", "policies", "one"],
)
def test_what_a_policy_keeps_stays(
    tmp_path: Path, keep: int | Sequence[KeepLast | KeepEvery] | None, left: list[int]
) -> None:
    checkpoints = remesh.Checkpoints(tmp_path, keep=keep)
    for step in range(5):
        checkpoints.save(step, state(step))
    assert checkpoints.steps() == left


@both
def test_a_step_that_is_not_after_the_newest_is_refused_until_the_later_ones_are_dropped(
    tmp_path: Path, background: bool
) -> None:
    checkpoints = remesh.Checkpoints(tmp_path, background=background)
    for step in (2, 4, 6):
        checkpoints.save(step, state(step))
    with pytest.raises(
        CheckpointMismatchError, match="step 5 .* from 7 on, since the newest checkpoint is of step 6; .* drop_after"
    ):
        checkpoints.save(5, state(5))
    assert checkpoints.drop_after(4) == [6]
    checkpoints.save(5, state(5)).result()
    assert checkpoints.steps() == [2, 4, 5]


def test_a_directory_that_no_save_has_committed_does_not_count(tmp_path: Path) -> None:
    checkpoints = remesh.Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1))
    for step in (2, 9):  # as killed saves leave them
        (tmp_path / step_name(step)).mkdir()
        (tmp_path / step_name(step) / ".remesh-save-in-progress").touch()
    assert checkpoints.latest() == 1
    checkpoints.save(3, state(3))
    assert names(tmp_path) == [step_name(3), step_name(9)], "one that may be being written stays"


@pytest.mark.parametrize("asks", [True, False])
def test_the_error_of_a_save_in_the_background_is_raised_once(
    tmp_path: Path, asks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its future, for whoever asks, else by the next call; then saving goes on."""
    checkpoints = remesh.Checkpoints(tmp_path, keep=1, background=True)
    checkpoints.save(1, state(1)).result()

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr("remesh.checkpoint.plain.write_part", full)
        saved = checkpoints.save(2, state(2))
        with pytest.raises(CheckpointPathError, match="No space left"):
            saved.result() if asks else checkpoints.save(3, state(3))
        assert "No space left" in caplog.text
    assert checkpoints.latest() == 1
    checkpoints.save(3, state(3))
    checkpoints.wait()
    assert checkpoints.latest() == 3


def test_a_save_that_fails_in_the_call_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = remesh.Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1))

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(CheckpointPathError, match="No space left"):
        patched.setattr("remesh.checkpoint.plain.write_part", full)
        checkpoints.save(2, state(2))
    assert checkpoints.latest() == 1
    checkpoints.save(3, state(3))
    assert checkpoints.latest() == 3


def test_nothing_to_load_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointPathError, match="found none that is complete"):
        remesh.Checkpoints(tmp_path / "none").load(state(0))


@pytest.mark.parametrize("keep", ["2", True, KeepLast(1)])
def test_what_is_no_number_and_no_policies_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(OptionError, match="option 'keep'"):
        remesh.Checkpoints(tmp_path, keep=keep)


def test_to_keep_none_of_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least 1"):
        remesh.Checkpoints(tmp_path, keep=0)
