"""Every store keeps the same promises; checkpoints live in each of them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointPathError
from remesh.checkpoint.formats.directory import IN_PROGRESS_FNAME
from remesh.checkpoint.plan.step_names import step_name
from remesh.checkpoint.run.housekeeping import decide_removals, list_checkpoints, remove_checkpoint
from remesh.checkpoint.storage import Entry, RemotePath, fsspec_client, location_of, remote_answers, store_of
from remesh.checkpoint.storage.checked_file import verify
from remesh.checkpoint.storage.fsspec_client import FsspecClient
from remesh.cli import main
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CONFIG_FNAME
from remesh.foundation.errors import ConfigError, Error, StorageError
from remesh.foundation.retention import KeepLast
from remesh.foundation.settings import STORE_TIMEOUT_S
from tests.unit.checkpoint.stores import BUCKET, CREDENTIALS

STATE = {"w": torch.arange(600.0).reshape(20, 30), "b": torch.arange(7, dtype=torch.int16), "step": 3, "lr": [0.1]}


def _put(place: str, name: str, content: bytes) -> None:
    path = location_of(place) / name
    store_of(path).make_directory(path.parent)
    store_of(path).put(path, content)


def test_what_is_put_is_read_back_whole_and_in_ranges(place):
    _put(place, "folder/file", bytes(range(200)))
    path = location_of(place) / "folder" / "file"
    store = store_of(path)
    assert store.read(path) == bytes(range(200)) and store.size_of(path) == 200
    with store.open_ranged(path) as file:
        part = bytearray(30)
        assert file.num_bytes == 200
        assert file.read_into(10, memoryview(part)) == 30 and part == bytes(range(10, 40))
        assert file.read_into(190, memoryview(part)) == 10 and part[:10] == bytes(range(190, 200))
        assert file.read_into(200, memoryview(part)) == 0


def test_a_new_file_holds_all_that_was_written_when_it_is_finished(place):
    path = location_of(place) / "file"
    store = store_of(path)
    store.make_directory(path.parent)
    with store.create(path) as file:
        file.write(memoryview(b"begin "))
        file.sync()
        file.write(memoryview(b"and end"))
        file.finish()
    assert store.read(path) == b"begin and end"


def test_an_entry_tells_files_with_their_length_from_directories(place):
    _put(place, "file", b"abc")
    _put(place, "folder/other", b"")
    directory = location_of(place)
    store = store_of(directory)
    assert store.entries(directory) == [Entry("file", 3), Entry("folder", None)]
    assert store.is_directory(directory) and store.is_directory(directory / "folder")
    assert not store.is_directory(directory / "file") and not store.is_directory(directory / "fold")
    assert store.size_of(directory / "folder") is None and store.size_of(directory / "nothing") is None


def test_a_replaced_file_has_another_version(place):
    _put(place, "file", b"one")
    path = location_of(place) / "file"
    first = store_of(path).version_of(path)
    _put(place, "file", b"three")
    assert first is not None and store_of(path).version_of(path) != first
    assert store_of(path).version_of(path / "missing") is None


def test_a_removed_file_is_gone_and_may_be_removed_again(place):
    _put(place, "file", b"abc")
    path = location_of(place) / "file"
    store_of(path).remove(path)
    store_of(path).remove(path)
    assert store_of(path).size_of(path) is None


@pytest.mark.parametrize("ask", ["read", "open_ranged", "entries"])
def test_a_path_that_is_not_there_is_a_file_not_found_error(place, ask):
    path = location_of(place) / "missing" / "file"
    with pytest.raises(FileNotFoundError):
        getattr(store_of(path), ask)(path)


def test_what_climbs_out_of_a_directory_is_not_inside(place):
    directory = location_of(place)
    store = store_of(directory)
    assert store.is_inside(directory, directory / "a" / "b")
    assert not store.is_inside(directory, directory / ".." / "b")
    assert not store.is_inside(directory / "a", directory / "ab")


def test_a_state_comes_back_from_every_store(place):
    path = f"{place}/step-00000001"
    remesh.save(STATE, path)
    loaded = remesh.load({"w": torch.zeros(20, 30), "b": torch.zeros(7, dtype=torch.int16)}, path)
    assert torch.equal(loaded["w"], STATE["w"]) and torch.equal(loaded["b"], STATE["b"])
    assert loaded["step"] == 3 and loaded["lr"] == [0.1]
    assert sum(num_bytes for _, num_bytes in verify(location_of(path))) > 0


def test_sharded_entry_points_take_a_place_in_every_store(place):
    store_of(location_of(place)).make_directory(location_of(place))
    object_ = ShardedObject("o", {"a": 1}, (1,), (0,))
    shard = ShardedTensor.from_rank_offsets("w", torch.arange(6.0))
    dist_checkpointing.save({"t": shard, "o": object_, "x": 5}, place, verify_integrity=True)
    assert dist_checkpointing.check_is_distributed_checkpoint(place)
    assert dist_checkpointing.load_common_state_dict(place) == {"x": 5}
    assert sorted(dist_checkpointing.load_tensors_metadata(place)) == ["w"]
    want = {"t": ShardedTensor.from_rank_offsets("w", torch.zeros(6)), "o": ShardedObject("o", None, (1,), (0,))}
    loaded = dist_checkpointing.load(want, place, verify_integrity=True)
    assert torch.equal(loaded["t"], torch.arange(6.0)) and loaded["o"] == {"a": 1}
    dist_checkpointing.remove_sharded_tensors(place, "w")
    assert dist_checkpointing.load_tensors_metadata(place) == {}


def test_a_complete_checkpoint_is_not_overwritten_in_any_store(place):
    remesh.save(STATE, f"{place}/one")
    with pytest.raises(CheckpointPathError, match="already holds a complete checkpoint"):
        remesh.save(STATE, f"{place}/one")


def test_without_its_marker_a_save_is_invisible_and_may_be_repeated(place):
    for step in (1, 2):
        remesh.save(STATE, f"{place}/{step_name(step)}")
    directory = location_of(place) / step_name(2)
    store_of(directory).remove(directory / CONFIG_FNAME)
    store_of(directory).put(directory / IN_PROGRESS_FNAME, b"")
    assert remesh.latest_complete(place) == location_of(place) / step_name(1)
    with pytest.raises(CheckpointFormatError, match="not a distributed checkpoint"):
        remesh.load({"w": torch.zeros(20, 30)}, directory)
    remesh.save(STATE, directory)
    assert remesh.latest_complete(place) == directory


def test_the_marker_is_the_last_file_that_a_save_writes(place, monkeypatch):
    store = store_of(location_of(place))
    written: list[str] = []

    def telling(act: Any) -> Any:
        def acting(self: Any, path: Any, *more: Any) -> Any:
            written.append(more[0].name if act.__name__ == "rename" else path.name)
            return act(self, path, *more)

        return acting

    for name in ("create_once", "put", "create", "write_soon", "rename"):
        monkeypatch.setattr(type(store), name, telling(getattr(type(store), name)))
    remesh.save(STATE, f"{place}/one")
    assert written[0] == IN_PROGRESS_FNAME and written[-1] == CONFIG_FNAME and "__0_0.distcp" in written


def test_a_mark_whose_beginning_another_save_sweeps_away_is_made_all_the_same(tmp_path, monkeypatch):
    """The other one has come to its end in the instant between the writing of a mark and its name."""
    link, mark = os.link, tmp_path / IN_PROGRESS_FNAME
    swept = []

    def sweep_once(source, target):
        if not swept:
            swept.append(source)
            Path(source).unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", sweep_once)
    assert store_of(mark).create_once(mark, b"mine")
    assert swept and mark.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [mark]
    with pytest.raises(FileNotFoundError):
        store_of(mark).create_once(tmp_path / "nowhere" / IN_PROGRESS_FNAME, b"mine")


def test_a_file_that_another_save_removes_while_a_folder_is_listed_is_left_out(tmp_path, monkeypatch):
    """Its mark's beginning, say: whoever has lost a turn removes that."""
    (tmp_path / "kept").write_bytes(b"abc")
    (tmp_path / "swept.tmp").touch()
    scandir = os.scandir

    @contextlib.contextmanager
    def scan_and_sweep(directory):
        with scandir(directory) as found:
            listed = list(found)
        (tmp_path / "swept.tmp").unlink()
        yield listed

    monkeypatch.setattr(os, "scandir", scan_and_sweep)
    assert store_of(tmp_path).entries(tmp_path) == [Entry("kept", 3)]


def test_retention_lists_and_removes_in_every_store(place):
    for step in (1, 2, 3):
        remesh.save(STATE, f"{place}/{step_name(step)}")
    found = list_checkpoints(location_of(place))
    assert [one.step for one in found] == [1, 2, 3] and all(one.num_bytes > 0 for one in found)
    for decision in decide_removals(found, [KeepLast(1)]):
        if decision.removes:
            assert remove_checkpoint(decision.found.directory) == []
    assert [entry.name for entry in store_of(location_of(place)).entries(location_of(place))] == [step_name(3)]


@pytest.mark.parametrize("command", ["ls {root}", "show {one}", "verify {one}", "diff {one} {one}"])
def test_tools_take_a_place_in_every_store(place, command):
    remesh.save(STATE, f"{place}/{step_name(1)}")
    arguments = command.format(root=place, one=f"{place}/{step_name(1)}").split()
    result = CliRunner().invoke(main, ["ckpt", *arguments])
    assert result.exit_code == 0, result.output


def test_a_damaged_block_is_told_with_its_place_in_every_store(place):
    path = location_of(place) / "one"
    remesh.save(STATE, path)
    data = path / "__0_0.distcp"
    content = bytearray(store_of(data).read(data))
    content[900] ^= 1
    store_of(data).put(data, bytes(content))
    with pytest.raises(CheckpointFormatError, match=r"__0_0\.distcp have checksum"):
        remesh.load({"w": torch.zeros(20, 30)}, path)


def test_an_aborted_upload_leaves_nothing(place):
    path = location_of(place) / "file"
    store = store_of(path)
    store.make_directory(path.parent)
    with pytest.raises(RuntimeError, match="changed my mind"), store.create(path) as file:
        file.write(memoryview(b"half"))
        raise RuntimeError("changed my mind")
    if not isinstance(path, Path):
        assert store.size_of(path) is None


class _Flaky:
    """A client's read that is answered at the attempt ``works_at``."""

    def __init__(self, works_at: int, raised: Exception) -> None:
        self.num_calls = 0
        self.works_at = works_at
        self.raised = raised

    def __call__(self, client: FsspecClient, path: RemotePath) -> bytes:
        self.num_calls += 1
        if self.num_calls < self.works_at:
            raise self.raised
        return b"content"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(remote_answers.time, "sleep", taken.append)
    return taken


def test_a_store_that_fails_for_a_while_is_asked_again(monkeypatch, pauses, caplog):
    flaky = _Flaky(4, ConnectionResetError("reset"))
    monkeypatch.setattr(FsspecClient, "read", lambda *given: flaky(*given))
    with caplog.at_level(logging.CRITICAL):
        assert store_of(RemotePath("memory", "b/f")).read(RemotePath("memory", "b/f")) == b"content"
    assert flaky.num_calls == 4 and pauses == [0.2, 0.4, 0.8]


def test_a_store_that_keeps_failing_is_an_error_after_a_bounded_number_of_attempts(monkeypatch, pauses, caplog):
    flaky = _Flaky(10**9, ConnectionResetError("reset by peer"))
    monkeypatch.setattr(FsspecClient, "read", lambda *given: flaky(*given))
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(StorageError, match="tried 5 times.*reset by peer"),
    ):
        store_of(RemotePath("memory", "b/f")).read(RemotePath("memory", "b/f"))
    assert flaky.num_calls == FsspecClient.num_attempts == 5


class _Silent(MemoryFileSystem):
    """A store that takes what it is asked, and never answers some of it."""

    protocol = "silent"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked: ClassVar[str] = ""
    """The method that is never answered."""
    given_up = threading.Event()

    def _maybe_wait(self, method: str) -> None:
        if method == self.asked:
            self.given_up.wait()

    def info(self, path: str, **options: Any) -> Any:
        self._maybe_wait("info")
        return super().info(path, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        self._maybe_wait("pipe_file")
        return super().pipe_file(path, value, mode, **options)

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        self._maybe_wait("cat_file")
        return super().cat_file(path, *args, **options)

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        file = super()._open(path, mode, *args, **options)
        if "w" in mode and self.asked == "write":
            file.write = lambda _: self.given_up.wait()
        return file


@pytest.mark.parametrize("asked", ["info", "pipe_file", "write", "cat_file"])
@pytest.mark.parametrize("background", [False, True])
def test_a_store_that_never_answers_is_told_in_the_log_and_ends_with_an_error(
    monkeypatch, caplog, asked: str, background: bool
) -> None:
    fsspec.register_implementation("silent", _Silent, clobber=True)
    monkeypatch.setattr(_Silent, "store", {})
    monkeypatch.setattr(_Silent, "given_up", threading.Event())
    remesh.save(STATE, "silent://run/first")
    monkeypatch.setattr(_Silent, "asked", asked)
    monkeypatch.setenv(STORE_TIMEOUT_S.name, "0.1")
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError, match=r"no answer for 0\.1 s"):
        if asked == "cat_file":
            remesh.load({"w": torch.zeros(20, 30)}, "silent://run/first")
        remesh.save(STATE, "silent://run/second", background=background).result()
    assert "no answer for 0.05 s, waiting 0.1 s in all" in caplog.text
    _Silent.given_up.set()


def test_a_store_is_used_where_the_process_gives_no_more_threads(monkeypatch) -> None:
    """As in an `atexit` handler, from Python 3.12 on."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    remesh.save(STATE, "memory://before/c")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    remesh.save(STATE, "memory://late/c", background=True).result()
    monkeypatch.undo()
    loaded = {"w": torch.zeros(20, 30)}
    remesh.load(loaded, "memory://late/c")
    assert torch.equal(loaded["w"], STATE["w"])


@pytest.mark.parametrize("given", ["soon", "0", "-3", "nan", "inf"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(monkeypatch, given: str) -> None:
    monkeypatch.setenv(STORE_TIMEOUT_S.name, given)
    with pytest.raises(Error, match=f"{STORE_TIMEOUT_S.name}: found '{given}'"):
        remesh.load({}, "memory://nowhere")


class _Broken:
    """A client that loses its connection where a path has some text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.call = fsspec_client._call

    def __call__(self, path: RemotePath, method: str, *args: Any, **options: Any) -> Any:
        if self.text not in str(path):
            return self.call(path, method, *args, **options)
        raise ConnectionResetError("reset by peer")


@pytest.mark.parametrize("broken", ["unreachable", step_name(2)])
@pytest.mark.parametrize("look", [remesh.latest_complete, lambda root: remesh.Checkpoints(root, keep=1).steps()])
def test_a_store_that_gives_no_answer_is_not_taken_for_one_without_the_newest_checkpoint(
    monkeypatch, pauses, caplog, look, broken
):
    with remesh.Checkpoints("memory://unreachable/run") as checkpoints:
        for step in (1, 2):
            if step not in checkpoints.steps():  # memory outlives a test
                checkpoints.save(step, STATE)
    monkeypatch.setattr(fsspec_client, "_call", _Broken(broken))
    with caplog.at_level(logging.CRITICAL), pytest.raises(StorageError, match="reset by peer"):
        look("memory://unreachable/run")


def test_a_folder_that_gives_no_answer_is_not_taken_for_none(monkeypatch, tmp_path):
    """Python 3.14 has `Path.is_dir` say no to every error, as `os.path.isdir` always did."""
    remesh.save(STATE, tmp_path / step_name(1))
    ask = os.stat

    def fail(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if os.fspath(path) == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return ask(path, *args, **options)

    monkeypatch.setattr(Path, "is_dir", lambda path: os.path.isdir(path))
    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(OSError, match="Input/output error"):
        remesh.latest_complete(tmp_path)


def test_a_definite_answer_is_not_asked_for_again(monkeypatch, pauses):
    flaky = _Flaky(10**9, PermissionError("no"))
    monkeypatch.setattr(FsspecClient, "read", lambda *given: flaky(*given))
    with pytest.raises(PermissionError):
        store_of(RemotePath("memory", "b/f")).read(RemotePath("memory", "b/f"))
    assert flaky.num_calls == 1 and pauses == []


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_one_clear_error_and_is_not_made(s3_environment, monkeypatch):
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(CheckpointPathError, match="saving checkpoint s3://no-such-bucket/one"):
            remesh.save(STATE, "s3://no-such-bucket/one")


@pytest.mark.slow
def test_no_file_of_a_checkpoint_holds_credentials(s3_environment, monkeypatch, caplog):
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    path = location_of(f"s3://{BUCKET}/secret-free")
    with caplog.at_level(logging.DEBUG, logger="remesh"):
        remesh.save(STATE, path)
    store = store_of(path)
    contents = [store.read(path / entry.name) for entry in store.entries(path)] + [caplog.text.encode()]
    for secret in (CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]):
        assert not any(secret.encode() in content for content in contents)


def test_a_url_with_credentials_is_refused_without_repeating_them():
    with pytest.raises(ConfigError) as raised:
        location_of("s3://name:secret@bucket/one")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("given", [Path("s3://bucket/one"), "simplecache::s3://bucket/one"])
def test_a_url_that_lost_its_form_is_refused(given):
    with pytest.raises(ConfigError, match="neither a path nor a URL"):
        location_of(given)


def test_file_urls_and_paths_are_the_same_place(tmp_path):
    assert location_of(f"file://{tmp_path}/one") == location_of(f"{tmp_path}/one") == location_of(tmp_path / "one")


def test_a_save_in_the_background_goes_to_every_store(place):
    store_of(location_of(place)).make_directory(location_of(place))
    values = torch.arange(6.0)
    request = dist_checkpointing.save(
        {"t": ShardedTensor.from_rank_offsets("w", values), "x": 5}, place, async_sharded_save=True
    )
    values.zero_()
    assert request is not None and not dist_checkpointing.check_is_distributed_checkpoint(place)
    request.execute_sync()
    assert torch.equal(dist_checkpointing.load_plain_tensors(place)["w"], torch.arange(6.0))


def test_a_part_of_a_large_tensor_is_read_without_the_rest(place):
    store = store_of(location_of(place))
    whole = torch.arange(4 << 20, dtype=torch.float32).reshape(1024, 4096)
    remesh.save({"w": whole}, f"{place}/one")
    read: list[int] = []
    open_ranged = type(store).open_ranged

    def told(self: Any, path: Any) -> Any:
        file = open_ranged(self, path)
        read_into = file.read_into

        def counted(start: int, destination: memoryview) -> int:
            read.append(len(destination))
            return read_into(start, destination)

        file.read_into = counted
        return file

    part = ShardedTensor("w", torch.zeros(64, 4096), torch.float32, (64, 4096), (1024, 4096), (512, 0), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "open_ranged", told)
        loaded = dist_checkpointing.load({"w": part}, f"{place}/one", validate_access_integrity=False)
    assert torch.equal(loaded["w"], whole[512:576])
    assert part.data is not None and part.data.nbytes <= sum(read) < 1.5 * part.data.nbytes
