"""Records of an image as JSON and back; what is not as it should be is refused, whatever it is."""

from __future__ import annotations

import array
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from remesh.carried.images.form import format as image_format
from remesh.carried.images.form.family import INIT, OUTSIDE, Kin
from remesh.carried.images.form.format import (
    Ancestor,
    AreasState,
    ChunksState,
    DescriptorState,
    FileIdentity,
    FilesState,
    Header,
    PageChunk,
    PagesState,
    ProcessState,
    ThreadsState,
)
from remesh.carried.images.form.layers import PageRun
from remesh.carried.images.form.pages import place_runs
from remesh.carried.images.form.records import from_json, to_json
from remesh.carried.images.form.tree_format import (
    CarriedFile,
    FileKind,
    OpenFile,
    PipeState,
    PollWatch,
    SocketPart,
    SocketState,
    TreeState,
)
from remesh.foundation.errors import FormatError

_KINDS = [Header, ProcessState, ThreadsState, AreasState, FilesState, PagesState, ChunksState, TreeState]
_MACHINE = {"vdso_sha256": "", "special_areas": {"[vdso]": 8192}, "xstate_bytes": 832, "cpu_flags": "", "kernel": ""}
_HEADER: dict[str, Any] = {
    "version": image_format.VERSION,
    "pid": 1000,
    "compressed": False,
    "builds_upon": [{"folder": "../a", "sha256": "b"}],
    "machine": _MACHINE,
    "files": {name: {"num_bytes": 1, "sha256": ""} for name in image_format.RECORD_FILES},
    "members": {},
}


def test_a_header_is_read_as_it_was_written() -> None:
    header = from_json(Header, _HEADER, "image.json")
    assert header.builds_upon == (Ancestor("../a", "b"),)
    assert to_json(header) == _HEADER


_CARRIED = {"in_memory": True, "names": [], "folder": "", "mode": 0o600, "num_bytes": 9, "runs": ""}


@pytest.mark.parametrize("numbers", [(0,), (0, 0), (3, 2, 1, 1), (0, 10), (1 << 63, 1 << 63)])
def test_pieces_of_a_file_that_do_not_fit_are_refused(numbers: tuple[int, ...]) -> None:
    record = {**_CARRIED, "runs": array.array("Q", numbers).tobytes().hex()}
    with pytest.raises(FormatError, match="a carried file"):
        from_json(CarriedFile, record, "tree.json")


@pytest.mark.parametrize("name", ["/etc/passwd", "/dev/shm/..", "/dev/shm/", "/dev/shm/a/b", "/dev/shm/a\0", "a", ""])
def test_a_carried_file_with_a_name_outside_of_shared_memory_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match="expected one in /dev/shm"):
        from_json(CarriedFile, {**_CARRIED, "names": [name]}, "tree.json")


_ROOT = Kin(1000, INIT, 1000, OUTSIDE, None, "root")


@pytest.mark.parametrize("kind", [FileKind.CARRIED, FileKind.PIPE, FileKind.FILE])
@pytest.mark.parametrize("target", [-2, 0])
def test_an_open_file_of_what_the_tree_does_not_have_is_refused(kind: FileKind, target: int) -> None:
    record = to_json(TreeState((_ROOT,), (), (), (), (), ()))
    record["files"] = [to_json(OpenFile(kind, 0, "", 0, None, target, 0, ()))]
    with pytest.raises(FormatError, match="open file 0"):
        from_json(TreeState, record, "tree.json")


_SOCKET = SocketState(1, False, True, b"", 0, 0, 1, -1, 0, 4096, {7: b"x"}, (SocketPart(b"data", ()),))
_LISTENER = SocketState(1, True, False, b"/tmp/name", 0o755, 5, -1, -1, 0, 4096, {}, ())


def test_sockets_survive_the_way_through_json() -> None:
    waiting = dataclasses.replace(_SOCKET, peer=-1, listener=2, queue=())
    those = (_SOCKET, dataclasses.replace(_SOCKET, peer=0), _LISTENER, waiting)
    record = TreeState((_ROOT,), (), (), (), those, ())
    assert from_json(TreeState, json.loads(json.dumps(to_json(record))), "tree.json") == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peer": 1}, "socket 0 is connected with 1"),
        ({"peer": 0}, "socket 0 is connected with 0"),
        ({"peer": -2}, "socket 0 is connected with -2"),
        ({"peer": -1, "listener": 0}, "socket 0 waits for socket 0"),
        ({"kind": 3}, "a socket is of kind 3"),
        ({"name": "2f746d70"}, "a socket has the name"),
        ({"listens": True}, "a socket has the name"),
        ({"is_connected": False}, "without a peer"),
        ({"peer": -1, "queue": [{"data": "", "files": [0]}]}, "open files .0. on their way"),
    ],
)
def test_a_socket_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    record = {**to_json(TreeState((_ROOT,), (), (), (), (), ())), "sockets": [{**to_json(_SOCKET), **change}]}
    with pytest.raises(FormatError, match=message):
        from_json(TreeState, record, "tree.json")


@pytest.mark.parametrize(
    ("kin", "message"),
    [
        ([], "the root of the tree"),
        ([dataclasses.replace(_ROOT, exit_status=0)], "the root of the tree"),
        ([_ROOT, _ROOT], "expected each once"),
        ([_ROOT, dataclasses.replace(_ROOT, pid=1001, parent=5)], "does not descend"),
    ],
)
def test_relatives_that_cannot_be_made_are_refused(kin: list[Kin], message: str) -> None:
    record = {**to_json(TreeState((_ROOT,), (), (), (), (), ())), "kin": to_json(kin)}
    with pytest.raises(FormatError, match=message):
        from_json(TreeState, record, "tree.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 1),
        ("version", True),
        ("pid", 1),
        ("pid", "1000"),
        ("compressed", 0),
        ("builds_upon", [{"folder": "/absolute", "sha256": ""}]),
        ("builds_upon", {}),
        ("files", {}),
        ("files", {**_HEADER["files"], "../../elsewhere": {"num_bytes": 1, "sha256": ""}}),
    ],
)
def test_a_header_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    with pytest.raises(FormatError, match="image.json"):
        from_json(Header, {**_HEADER, field: value}, "image.json")


def test_missing_and_unknown_fields_are_refused() -> None:
    with pytest.raises(FormatError, match="the fields"):
        from_json(Header, {name: value for name, value in _HEADER.items() if name != "pid"}, "image.json")
    with pytest.raises(FormatError, match="the fields"):
        from_json(Header, {**_HEADER, "more": 1}, "image.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(json_values, st.sampled_from(_KINDS))
def test_foreign_json_is_refused_and_nothing_else(value: object, kind: type) -> None:
    with pytest.raises(FormatError):
        from_json(kind, value, "some file")


open_files = st.builds(
    OpenFile,
    kind=st.sampled_from([kind for kind in FileKind if kind not in (FileKind.CARRIED, FileKind.PIPE, FileKind.SOCKET)]),
    flags=st.integers(0, 99),
    path=st.text(max_size=5),
    position=st.integers(0, 99),
    content=st.none() | st.builds(FileIdentity, st.integers(0, 9), st.integers(0, 9), st.text(max_size=3)),
    target=st.just(-1),
    count=st.integers(0, 9),
    watches=st.sampled_from([(), (PollWatch(1000, 4, 5, 1, (1 << 64) - 1),)]),
)
carried_files = st.builds(
    CarriedFile,
    in_memory=st.booleans(),
    names=st.sampled_from([(), ("/dev/shm/a",), ("/dev/shm/a", "/dev/shm/sem.b")]),
    folder=st.text(max_size=5),
    mode=st.integers(0, 0o777),
    num_bytes=st.integers(9, 99),
    runs=st.sampled_from([(), (0, 9), (2, 3, 7, 2)]).map(lambda numbers: array.array("Q", numbers).tobytes()),
)
pipes = st.builds(PipeState, capacity=st.integers(9, 99), data=st.binary(max_size=9))


@given(st.lists(open_files, max_size=3), st.lists(carried_files, max_size=2), st.lists(pipes, max_size=2))
def test_open_files_survive_the_way_through_json(
    states: list[OpenFile], carried: list[CarriedFile], those: list[PipeState]
) -> None:
    states += [OpenFile(FileKind.CARRIED, 0, "", 0, None, at, 0, ()) for at in range(len(carried))]
    states += [OpenFile(FileKind.PIPE, 0, "", 0, None, at, 0, ()) for at in range(len(those))]
    record = TreeState((_ROOT,), tuple(states), tuple(carried), tuple(those), (), ())
    assert from_json(TreeState, json.loads(json.dumps(to_json(record))), "tree.json") == record


@pytest.mark.parametrize("numbers", [(1, 1), (2, 1), (-1,), (1 << 30,)])
def test_descriptors_that_are_not_in_order_are_refused(numbers: tuple[int, ...]) -> None:
    record = {"descriptors": [to_json(DescriptorState(number, 0, False)) for number in numbers]}
    with pytest.raises(FormatError, match="descriptors"):
        from_json(FilesState, record, "files.json")


def test_every_field_of_every_record_is_of_a_kind_that_json_holds() -> None:
    for kind in _KINDS:
        for field in dataclasses.fields(kind):
            assert "Any" not in str(field.type), f"{kind.__name__}.{field.name}"


@given(
    st.lists(st.integers(1, 6), max_size=8),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_runs_are_placed_whole_however_the_chunks_cut_them(sizes: list[int], chunks: list[int], random: Any) -> None:
    page = 4096
    raw = bytes(random.randrange(256) for _ in range(sum(sizes))) if sizes else b""
    stored = b"".join(bytes([value]) * page for value in raw)
    runs, at, memory = [], 0, {}
    for index, size in enumerate(sizes):
        runs.append(PageRun((index * 100) * page, size, 0, at * page))
        at += size
    cuts, offset = [], 0
    while offset < len(stored):
        size = chunks[len(cuts) % len(chunks)] * page
        cuts.append((offset, memoryview(stored[offset : offset + size])))
        offset += size
    place_runs(runs, iter(cuts), lambda address, data: memory.update({address + i: b for i, b in enumerate(data)}))
    for run in runs:
        expected = stored[run.raw_offset : run.raw_offset + run.num_bytes]
        assert bytes(memory.pop(run.start + i) for i in range(run.num_bytes)) == expected
    assert not memory


def test_an_index_of_chunks_knows_how_long_they_are_together() -> None:
    assert ChunksState((PageChunk(4096, 10, 0), PageChunk(8192, 20, 0))).num_stored_bytes == 30


def test_the_names_of_files_are_plain() -> None:
    assert all(Path(name).name == name for name in image_format.RECORD_FILES)
