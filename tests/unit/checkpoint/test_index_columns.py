"""The columns of an index say what its pickle says, to whoever asks for one tensor or all; a stranger's are refused."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats.directory import COLUMNS_FNAME
from remesh.checkpoint.formats.index_columns import ColumnTensors, decode_columns
from remesh.checkpoint.formats.index_files import IndexFiles, encode_columns, seal_columns
from remesh.checkpoint.formats.torch_format import read_manifest
from remesh.checkpoint.plan.manifest import Index, IndexedTensor, Manifest
from remesh.checkpoint.run import reader
from remesh.checkpoint.storage.integrity import CHECKSUMS_FNAME, read_checksums
from remesh.dist_checkpointing import ShardedTensor
from remesh.foundation.checksums import crc32
from remesh.layout import itemsize_bytes

METADATA = b"what .metadata holds"
IDENTITY = (len(METADATA), crc32(METADATA))
FILES = st.sampled_from(["__0_0.distcp", "hint__1_0.distcp"])


@st.composite
def indices(draw: st.DrawFn) -> Index:
    tensors = {}
    for key in draw(st.lists(st.text(max_size=6), max_size=5, unique=True)):
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int8"]))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        chunks = []
        for _ in range(draw(st.integers(0, 3))):
            box = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
            start, size = tuple(a for a, _ in box), tuple(b - a for a, b in box)
            length = 1000 * itemsize_bytes(dtype) + draw(st.integers(0, 9))
            if start not in [one[0] for one in chunks]:
                chunks.append((start, size, (draw(FILES), draw(st.integers(0, 2**40)), length)))
        tensors[key] = IndexedTensor(dtype, shape, chunks)
    objects = {f"object {number}": (draw(FILES), number, 7) for number in range(draw(st.integers(0, 3)))}
    return Index(tensors, objects, {})


def manifest_of(index: Index, columns: bytes | None = None) -> Manifest:
    sealed = seal_columns(encode_columns(index) if columns is None else columns, METADATA)
    found = decode_columns(sealed, IDENTITY, Path("index"), lambda name: None)
    assert found is not None
    return found


@given(indices())
def test_columns_and_pickle_give_the_same_manifest(tmp_path_factory: pytest.TempPathFactory, index: Index) -> None:
    directory = tmp_path_factory.mktemp("index")
    for name, content in IndexFiles.of(index).contents(directory).items():
        (directory / name).write_bytes(content)
    by_pickle, by_columns = read_manifest(directory), manifest_of(index)
    assert dict(by_columns.tensors) == by_pickle.tensors
    assert by_columns.objects == by_pickle.objects
    assert isinstance(by_columns.tensors, ColumnTensors)
    whole = {
        key: (one.dtype, one.global_shape, (extent.file, extent.file_start, extent.length_bytes))
        for key, one in by_pickle.tensors.items()
        if len(one.chunks) == 1 and one.chunks[0].box.shape == one.global_shape
        for extent in (one.chunks[0].extent,)
    }
    assert by_columns.tensors.whole == whole


def test_columns_of_another_pickle_count_for_nothing() -> None:
    sealed = seal_columns(encode_columns(Index({}, {}, {})), b"another")
    assert decode_columns(sealed, IDENTITY, Path("index"), lambda name: None) is None


def test_shapes_before_flattening_are_told(tmp_path: Path) -> None:
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.arange(6.0), (2, 3), flattened_range=slice(0, 6))
    dist_checkpointing.save({"w": flat}, tmp_path)
    checksums = read_checksums(tmp_path)
    assert read_manifest(tmp_path, checksums).unflattened_shapes == read_manifest(tmp_path).unflattened_shapes
    assert read_manifest(tmp_path, checksums).flattened == read_manifest(tmp_path).flattened == {"w"}


def test_a_load_reads_the_columns_and_without_them_the_pickle(tmp_path: Path) -> None:
    w = torch.randn(5, 3)
    remesh.save({"w": w}, tmp_path)
    assert isinstance(reader.open_checkpoint(tmp_path).manifest.tensors, ColumnTensors)
    (tmp_path / CHECKSUMS_FNAME).unlink()
    (tmp_path / COLUMNS_FNAME).unlink()
    assert torch.equal(remesh.load({"w": torch.zeros(5, 3)}, tmp_path)["w"], w)


def test_removing_tensors_leaves_columns_that_fit(tmp_path: Path) -> None:
    remesh.save({"a": {"w": torch.ones(3)}, "b": torch.ones(2)}, tmp_path)
    dist_checkpointing.remove_sharded_tensors(tmp_path, "a")
    manifest = read_manifest(tmp_path, read_checksums(tmp_path))
    assert isinstance(manifest.tensors, ColumnTensors)
    assert list(manifest.tensors) == ["b"]


GOOD = Index({"w": IndexedTensor("float32", (4, 2), [((0, 0), (4, 2), ("__0_0.distcp", 0, 900))])}, {}, {})


def changed(**fields: object) -> bytes:
    head, _, numbers = encode_columns(GOOD).partition(b"\n")
    return json.dumps({**json.loads(head), **fields}).encode() + b"\n" + numbers


def with_number(place: int, value: int) -> bytes:
    columns = bytearray(encode_columns(GOOD))
    struct.pack_into("<q", columns, columns.index(b"\n") + 1 + 8 * place, value)
    return bytes(columns)


@pytest.mark.parametrize(
    "columns",
    [
        *(b"", b"\n", b"{}\n", b"[" * 100_000 + b"\n", b'{"version": 1}\n', b"\xff\n", encode_columns(GOOD)[:-8]),
        *(changed(version=2), changed(kinds=[["system", [4, 2]]]), changed(kinds=[["float32", [4, -2]]])),
        *(changed(kinds=[["float32", [4]]]), changed(kinds=[["float32", [1 << 70, 2]]]), changed(kinds=[])),
        *(changed(files=[]), changed(files=[3]), changed(objects=["w"])),
        *(changed(tensors=["w", "w"]), changed(tensors="w")),
        *(changed(num_chunks=0), changed(num_chunks=1 << 62), changed(num_chunks=-1), changed(num_chunks="many")),
        # kind, number of chunks, file, start, length, starts of the box, its shape
        *(with_number(0, 1), with_number(1, 2), with_number(1, 1 << 62), with_number(2, 1), with_number(3, -1)),
        *(with_number(4, 31), with_number(5, 1), with_number(5, 1 << 62), with_number(7, 5), with_number(7, 1 << 62)),
        encode_columns(GOOD) + bytes(8),
    ],
)  # fmt: skip
def test_columns_that_contradict_themselves_are_told(columns: bytes) -> None:
    with pytest.raises(CheckpointFormatError) as caught:
        manifest_of(GOOD, columns)
    assert caught.value.reason == "bad-metadata"


def test_any_change_of_the_columns_is_told_or_gives_boxes_inside_their_tensors() -> None:
    chance = random.Random(0)
    good = encode_columns(GOOD)
    for _ in range(500):
        spoilt = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        try:
            found = manifest_of(GOOD, bytes(spoilt))
        except CheckpointFormatError:
            continue
        for one in found.tensors.values():
            assert all(a <= n for chunk in one.chunks for a, n in zip(chunk.box.stop, one.global_shape, strict=True))


@pytest.mark.parametrize("name", ["../secret.distcp", "/etc/secret", "a/../../secret", "..", "", "a\\..\\b", "a\0b"])
def test_no_name_in_the_columns_leaves_the_directory(tmp_path: Path, name: str) -> None:
    remesh.save({"w": torch.ones(4, 2)}, tmp_path)
    path, sums = tmp_path / COLUMNS_FNAME, tmp_path / CHECKSUMS_FNAME
    end = path.read_bytes()[-20:]
    index = Index({"w": IndexedTensor("float32", (4, 2), [((0, 0), (4, 2), (name, 0, 900))])}, {}, {})
    path.write_bytes(encode_columns(index) + end)
    found = json.loads(sums.read_bytes()[:-9])  # made to fit, as a stranger would
    found["files"][COLUMNS_FNAME] = ["whole", path.stat().st_size, crc32(path.read_bytes())]
    body = json.dumps(found).encode() + b"\n"
    sums.write_bytes(body + b"%08x\n" % crc32(body))
    with pytest.raises(CheckpointFormatError) as caught:
        remesh.load({"w": torch.zeros(4, 2)}, tmp_path)
    assert caught.value.reason == "escaping-path"
