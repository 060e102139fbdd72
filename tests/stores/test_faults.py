"""Object stores that are slow, hang, drop connections, refuse or lie: each wait ends, and errors say what to do."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterator

import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.storage import location_of, obstore_client, store_of
from remesh.foundation.errors import ConfigError, StorageError
from remesh.foundation.settings import STORE_TIMEOUT_S
from tests.support.faulty_store import BUCKET, Fault, FaultyStore

pytestmark = [pytest.mark.stores]
short = pytest.mark.slow
"""Seconds; `make test-slow` runs these, too."""
_PART_BYTES = 5 << 20
"""The least that S3 takes."""


@pytest.fixture
def place() -> str:
    """A folder of its own: all servers of a process keep the same objects."""
    return f"s3://{BUCKET}/run-{uuid.uuid4()}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    monkeypatch.setattr(obstore_client, "_PART_BYTES", _PART_BYTES)
    monkeypatch.setattr(obstore_client, "_RANGE_BYTES", _PART_BYTES)
    with FaultyStore() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def _state(num_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(num_bytes // 4, dtype=torch.int32)}


def _check_loads(state: dict[str, torch.Tensor], place: str) -> None:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    remesh.load(loaded, place)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@short
def test_the_parts_of_a_file_and_the_ranges_of_a_read_go_side_by_side(server, place):
    server.fail("UploadPart", Fault.DELAY, seconds=1.0)
    server.fail("GetObject", Fault.DELAY, match="__0_0", seconds=0.5)
    state = _state(5 * _PART_BYTES)
    remesh.save(state, place)
    assert server.requests["UploadPart"] == 6 and server.peak["UploadPart"] >= 5
    _check_loads(state, place)
    assert server.peak["GetObject"] >= 4


@short
@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.DROP])
@pytest.mark.parametrize(
    "operation", ["PutObject", "UploadPart", "CompleteMultipartUpload", "GetObject", "HeadObject", "ListObjects"]
)
def test_a_request_that_fails_for_a_while_is_made_again(server, place, operation, fault):
    server.fail(operation, fault, times=2)
    state = _state(_PART_BYTES + (1 << 20))
    remesh.save(state, place)
    _check_loads(state, place)


@pytest.mark.parametrize("operation", ["UploadPart", "PutObject", "GetObject", "HeadObject", "CopyObject"])
def test_a_request_that_hangs_once_is_made_again(server, place, monkeypatch, operation):
    monkeypatch.setenv(STORE_TIMEOUT_S.name, "45")
    server.fail(operation, Fault.HANG, times=1, match=r"__0_0|metadata\.json")
    state = _state(_PART_BYTES + (1 << 20))
    remesh.save(state, place)
    _check_loads(state, place)


@short
@pytest.mark.parametrize(
    "operation", ["PutObject", "UploadPart", "CompleteMultipartUpload", "HeadObject", "ListObjects"]
)
def test_a_store_that_never_answers_ends_a_save_with_the_file_and_the_setting(
    server, place, monkeypatch, caplog, operation
):
    monkeypatch.setenv(STORE_TIMEOUT_S.name, "4")
    server.fail(operation, Fault.HANG)
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError, match=r"run.*(timed out|no answer for 4 s)"):
        remesh.save(_state(_PART_BYTES + (1 << 20)), place)
    assert place in caplog.text or operation == "PutObject"  # which is told by a file that is put more than once
    server.heal()
    monkeypatch.setenv(STORE_TIMEOUT_S.name, "60")
    remesh.save(_state(), f"{place}/again")
    _check_loads(_state(), f"{place}/again")


@short
def test_a_store_that_never_answers_ends_a_load(server, place, monkeypatch):
    remesh.save(_state(), place)
    monkeypatch.setenv(STORE_TIMEOUT_S.name, "15")
    server.fail("GetObject", Fault.HANG, match="__0_0")
    with pytest.raises(StorageError, match=r"reading.*__0_0\.distcp.*(timed out|no answer for 15 s)"):
        _check_loads(_state(), place)


@short
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault.WRONG_REGION, "AWS_REGION"),
        (Fault.EXPIRED, "ExpiredToken"),
        (Fault.FORBIDDEN, "AccessDenied"),
    ],
)
@pytest.mark.parametrize("operation", ["", "UploadPart"])
def test_a_store_that_refuses_for_ever_is_one_error_that_says_why(server, place, fault, told, operation):
    server.fail(operation, fault)
    with pytest.raises(StorageError, match=told) as raised:
        remesh.save(_state(_PART_BYTES + (1 << 20)), place)
    assert "Debug source" not in str(raised.value) and "testing-secret" not in str(raised.value)


@short
def test_a_store_that_has_kept_zeros_for_a_part_is_found_out_by_the_load(server, place):
    server.fail("UploadPart", Fault.ZEROS, match="partNumber=2", times=1)
    remesh.save(_state(3 * _PART_BYTES), place)
    with pytest.raises(CheckpointFormatError, match=r"__0_0\.distcp have checksum"):
        _check_loads(_state(3 * _PART_BYTES), place)


@short
def test_a_store_without_conditional_puts_keeps_checkpoints_all_the_same(server, place):
    server.fail("PutObject", Fault.NOT_IMPLEMENTED, match="save-in-progress", times=2)
    remesh.save(_state(), place)
    _check_loads(_state(), place)


@short
def test_an_upload_that_is_given_up_leaves_no_parts(server, place):
    path = location_of(f"{place}/file")
    with pytest.raises(RuntimeError), store_of(path).create(path) as file:
        file.write(memoryview(bytes(2 * _PART_BYTES)))
        raise RuntimeError("changed my mind")
    assert server.requests["AbortMultipartUpload"] == 1 and store_of(path).size_of(path) is None


@short
def test_a_forked_process_is_refused_the_store_of_its_parent(server, place):
    """Threads of a client do not live on after a fork: it would wait for them for ever."""
    remesh.save(_state(), place)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store_of(location_of(place)).size_of(location_of(place))
        except ConfigError as raised:
            code = 0 if "start it with spawn" in str(raised) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_slow_store_is_waited_for_while_it_moves(server, place, monkeypatch):
    """Each part takes more than half of what a request may: the save as a whole takes longer than that."""
    monkeypatch.setenv(STORE_TIMEOUT_S.name, "30")
    server.fail("UploadPart", Fault.DELAY, seconds=6.0)
    state = _state(40 * _PART_BYTES)
    started = time.monotonic()
    remesh.save(state, place)
    assert time.monotonic() - started > 30.0
    _check_loads(state, place)


@pytest.mark.parametrize("operation", ["", "UploadPart"])
def test_503_for_ever_ends_under_the_default_settings(server, place, operation):
    server.fail(operation, Fault.SLOW_DOWN)
    with pytest.raises(StorageError, match="SlowDown"):
        remesh.save(_state(_PART_BYTES + (1 << 20)), place)
