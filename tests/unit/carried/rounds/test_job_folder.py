"""The folder of a job: private, and a checkpoint is there whole or not at all."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from remesh.carried.rounds import job_folder as job
from remesh.carried.rounds.job_folder import JobFolder, JobSpec, JobState
from remesh.foundation.errors import ConfigError, FormatError, StorageError
from tests.support.log_lines import log_lines


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder.create(tmp_path / "job", JobSpec(("app.py",), 2, "/", {"HOME": "/h"}))


def test_what_was_asked_and_how_it_stands_are_read_back(folder: JobFolder) -> None:
    assert folder.read_spec() == JobSpec(("app.py",), 2, "/", {"HOME": "/h"})
    state = JobState("running", "well", (("127.0.0.1", 5),), 7, "h", {"mpi": "mpich"})
    folder.write_state(state)
    assert folder.read_state() == state


def test_nobody_else_can_read_secrets(folder: JobFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for name in ("token", "job.json", "state.json"):
        assert stat.S_IMODE((folder.path / name).stat().st_mode) == 0o600
    _, part = folder.begin_checkpoint()
    assert stat.S_IMODE(part.stat().st_mode) == 0o700


@pytest.mark.procs
def test_git_takes_no_secret_for_a_file_to_commit(folder: JobFolder) -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git, which is not on the path")
    subprocess.run(["git", "init", "--quiet", folder.path.parent], check=True)
    said = subprocess.run(["git", "status", "--porcelain"], cwd=folder.path.parent, capture_output=True, check=True)
    assert (folder.path / "token").is_file() and said.stdout == b""


def test_a_job_that_has_ended_cannot_be_called(folder: JobFolder) -> None:
    folder.write_state(JobState("running", "", (("127.0.0.1", 5),), 7, "h"))
    folder.change_state("failed", "rank 1 is gone")
    assert folder.read_state().addresses == ()
    assert folder.read_state().cause == "rank 1 is gone"


def test_a_folder_is_never_used_twice(folder: JobFolder) -> None:
    with pytest.raises(StorageError, match="making job folder"):
        JobFolder.create(folder.path, folder.read_spec())


def test_a_job_is_led_by_one_process_at_a_time(folder: JobFolder) -> None:
    folder.write_state(JobState("running", "", (("127.0.0.1", 5),), 77, "somewhere"))
    with folder.lead():
        with pytest.raises(ConfigError, match="process 77 on somewhere leads it"), JobFolder(folder.path).lead():
            pass
        shutil.copytree(folder.path, folder.path.with_name("copy"))
        with JobFolder(folder.path.with_name("copy")).lead():
            """A copy is another job."""
    with folder.lead():
        """Whoever ends lets go of it."""


def test_a_folder_that_cannot_be_filled_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job, "write_whole", write)
    with pytest.raises(StorageError, match="making job folder .*No space left on device; it was removed"):
        JobFolder.create(tmp_path / "job", JobSpec(("app.py",), 2, "/", {}))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_there_once_it_is_committed_and_not_before(folder: JobFolder) -> None:
    number, part = folder.begin_checkpoint()
    (part / "rank-0000").mkdir()
    assert (number, folder.checkpoints()) == (1, [])
    folder.commit_checkpoint(part, {"number": 1})
    assert [each.number for each in folder.checkpoints()] == [1]
    assert folder.checkpoint(None).rank_folder(0).is_dir()
    with pytest.raises(ConfigError, match="checkpoint 2"):
        folder.checkpoint(2)


def test_a_checkpoint_that_is_there_counts_also_if_its_disk_fails_after_that(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, part = folder.begin_checkpoint()
    flush = job.flush

    def fail_once_named(path: Path) -> None:
        if path == folder.images:
            raise OSError(errno.EIO, "Input/output error")
        flush(path)

    monkeypatch.setattr(job, "flush", fail_once_named)
    with log_lines("remesh.carried") as told:
        assert folder.commit_checkpoint(part, {"number": 1}) == folder.images / "000001"
    assert [each.number for each in folder.checkpoints()] == [1]
    assert "is a checkpoint, but its disk has not confirmed its name (Input/output error)" in told[0]


def test_what_an_interrupted_checkpoint_left_is_removed_by_the_next(folder: JobFolder) -> None:
    _, part = folder.begin_checkpoint()
    (part / "junk").write_bytes(b"x")
    again, fresh = folder.begin_checkpoint()
    assert again == 1 and not (fresh / "junk").exists()
    folder.begin_checkpoint()
    assert folder.has_remains() and folder.keep_last(1) == [] and not folder.has_remains()


def test_a_changed_manifest_is_refused(folder: JobFolder) -> None:
    _, part = folder.begin_checkpoint()
    final = folder.commit_checkpoint(part, {"number": 1})
    path = final / "manifest.json"
    path.write_text(path.read_text().replace('"number": 1', '"number": 2'))
    with pytest.raises(FormatError, match="digest"):
        folder.checkpoint(1)


def commit(folder: JobFolder, number: int, builds_upon: Sequence[int] = ()) -> Path:
    begun, part = folder.begin_checkpoint()
    assert begun == number
    return folder.commit_checkpoint(part, {"number": number, "builds_upon": list(builds_upon)})


@pytest.mark.parametrize("damage", ["half", "gone", "no object", "no manifest"])
def test_a_damaged_checkpoint_harms_no_other(folder: JobFolder, damage: str) -> None:
    for number in (1, 2, 3):
        commit(folder, number)
    path = folder.images / "000003" / "manifest.json"
    text = path.read_text()
    path.unlink()
    if damage != "gone":
        path.write_text({"half": text[: len(text) // 2], "no object": "[]", "no manifest": "{}"}[damage])
    assert [bool(each.problem) for each in folder.checkpoints()] == [False, False, True]
    assert folder.checkpoint(2).manifest["number"] == 2
    # The last one is what was asked for, and nobody chooses an older one in silence.
    with pytest.raises(FormatError, match=r"manifest.json.*name another one with --checkpoint: 1, 2"):
        folder.checkpoint(None)


def test_a_checkpoint_that_its_job_removes_while_they_are_listed_is_not_told_as_damaged(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        commit(folder, number)
    read_manifest = job.read_manifest

    def remove_and_read(place: Path) -> dict[str, Any]:
        if place.name == "000001":
            place.rename(place.with_name("000001.part"))
        return read_manifest(place)

    monkeypatch.setattr(job, "read_manifest", remove_and_read)
    assert [(each.number, each.problem) for each in folder.checkpoints()] == [(2, "")]


def test_a_job_whose_checkpoints_were_removed_by_hand_has_none(folder: JobFolder) -> None:
    commit(folder, 1)
    shutil.rmtree(folder.images)
    assert folder.checkpoints() == []
    with pytest.raises(ConfigError, match="it has none"):
        folder.checkpoint(None)


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(folder: JobFolder) -> None:
    for number in (1, 2, 3):
        commit(folder, number)
    (folder.images / "000003" / "manifest.json").write_text("{")
    assert folder.keep_last(2) == []
    commit(folder, 4)
    assert folder.keep_last(2) == [1]
    commit(folder, 5)
    assert folder.keep_last(2) == [2, 3]
    assert [each.number for each in folder.checkpoints()] == [4, 5]


@pytest.mark.parametrize("name", ["job.json", "state.json"])
@pytest.mark.parametrize("change", ["missing", "unknown", "wrong"])
def test_a_file_of_the_job_with_other_fields_is_told_as_damaged(folder: JobFolder, name: str, change: str) -> None:
    value = json.loads((folder.path / name).read_text())
    field = {"job.json": "argv", "state.json": "addresses"}[name]
    value |= {"unknown": {"colour": 1}, "wrong": {field: 3}}.get(change, {})
    if change == "missing":
        del value[field]
    (folder.path / name).write_text(json.dumps(value))
    with pytest.raises(FormatError, match=f"{name}: .*it is damaged"):
        folder.read_spec() if name == "job.json" else folder.read_state()


@pytest.mark.parametrize("name", ["job.json", "state.json"])
def test_a_field_of_another_type_is_told_as_damaged(folder: JobFolder, name: str) -> None:
    """Also one whose value would do until somebody prints it, or counts with it."""
    whole, read = (
        json.loads((folder.path / name).read_text()),
        folder.read_spec if name == "job.json" else folder.read_state,
    )
    for field, wrong in itertools.product(whole.keys() - {"version"}, (True, 1.5, [1.5], {"a": 1.5})):
        if field == "launch" and isinstance(wrong, dict):
            continue
        (folder.path / name).write_text(json.dumps(whole | {field: wrong}))
        with pytest.raises(FormatError, match=f"{name}: .*it is damaged"):
            read()
    for deep in ("[" * 5000, '{"a":' * 5000):
        (folder.path / name).write_text(deep)
        with pytest.raises(FormatError, match=f"{name}: .*it is damaged"):
            read()


@pytest.mark.parametrize("state", ["starting", "running"])
def test_a_job_whose_coordinator_was_killed_neither_starts_nor_runs_for_ever(folder: JobFolder, state: str) -> None:
    assert folder.find_state().state == "starting", "nobody leads a job that was just made"
    told = JobState(state, "2 ranks on h", (("127.0.0.1", 5),), 77, "h")
    folder.write_state(told)
    with folder.lead():
        assert folder.find_state() == told
    found = folder.find_state()
    assert (found.state, found.addresses) == ("failed", ()) and "process 77 on h, is gone" in found.cause


def test_the_last_checkpoints_stay_with_those_they_build_upon(folder: JobFolder) -> None:
    bases = {1: [], 2: [1], 3: [], 4: [], 5: [4], 6: [4, 5]}
    for number, base in bases.items():
        commit(folder, number, base)
    assert folder.keep_last(2) == [1, 2, 3]
    assert [each.number for each in folder.checkpoints()] == [4, 5, 6]
    assert folder.keep_last(1) == []


def test_a_job_without_program_or_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no program"):
        JobSpec((), 1, "/", {})
    with pytest.raises(ConfigError, match="0 ranks"):
        JobSpec(("a",), 0, "/", {})


def test_a_checkpoint_begins_only_where_one_like_the_last_has_room(folder: JobFolder) -> None:
    assert folder.find_lack_of_room() == ""
    for num_bytes, lacks in ((1 << 10, False), (1 << 60, True)):
        _, part = folder.begin_checkpoint()
        folder.commit_checkpoint(part, {"number": 1, "ranks": {"rank-0000": {"num_bytes": num_bytes}}})
        assert ("--keep K needs room for K + 1" in folder.find_lack_of_room()) is lacks


def test_a_removal_that_is_broken_off_leaves_nothing_that_looks_like_a_checkpoint(folder: JobFolder) -> None:
    for number in (1, 2, 3):
        commit(folder, number)
        (folder.images / f"{number:06d}" / "rank-0000").mkdir()
        (folder.images / f"{number:06d}" / "rank-0000" / "pages").touch()
    looks = iter([False, False])
    assert folder.keep_last(1, lambda: next(looks, True)) == [1]
    assert [each.number for each in folder.checkpoints()] == [2, 3]
    assert folder.keep_last(1, lambda: True) == []
    assert folder.keep_last(1) == [2]
    assert [path.name for path in folder.images.iterdir()] == ["000003"]
