"""The index as bytes: it unpickles to what torch's own classes pickle to."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats.index_files import encode_index
from remesh.checkpoint.formats.inert_pickle import load_inert
from remesh.checkpoint.plan.manifest import Index, IndexedTensor, Place
from remesh.foundation.errors import LayoutError

KEYS = st.text(st.characters(codec="utf-8"), max_size=12)
NUMBERS = st.integers(0, 2**70) | st.integers(0, 300)
SHAPES = st.lists(NUMBERS, max_size=3).map(tuple)
PLACES = st.tuples(st.sampled_from(["__0_0.distcp", "hint__1_0.distcp"]), NUMBERS, NUMBERS)
CHUNKS = st.lists(st.tuples(SHAPES, SHAPES, PLACES), max_size=3, unique_by=lambda chunk: chunk[0])
TENSORS = st.builds(IndexedTensor, st.sampled_from(["float32", "bfloat16", "int8"]), SHAPES, CHUNKS)


def by_torch(index: Index) -> Metadata:
    """The dumb twin: one object for everything."""

    def info(place: Place) -> _StorageInfo:
        return _StorageInfo(*place)

    states: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for key, blob in index.objects.items():
        states[key], places[MetadataIndex(key)] = BytesStorageMetadata(), info(blob)
    for key, one in index.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape, _ in one.chunks]
        properties = TensorProperties(dtype=getattr(torch, one.dtype))
        states[key] = TensorStorageMetadata(properties, torch.Size(one.global_shape), chunks)
        for number, (offset, _, blob) in enumerate(one.chunks):
            places[MetadataIndex(key, torch.Size(offset), number)] = info(blob)
    return Metadata(states, None, places, StorageMeta(checkpoint_id="here", save_id="now"), "1.0.0")


@given(st.dictionaries(KEYS, TENSORS, max_size=4), st.dictionaries(KEYS.map("o{}".format), PLACES, max_size=2))
def test_it_unpickles_to_the_objects_of_torch(tensors: dict[str, IndexedTensor], objects: dict[str, Place]) -> None:
    index = Index(tensors, {key: place for key, place in objects.items() if key not in tensors}, {})
    found = pickle.loads(encode_index(index).pickled("here", "now"))
    assert found == by_torch(index)
    assert {at: (key, key.index) for at, key in enumerate(found.storage_data)} == {
        at: (key, key.index) for at, key in enumerate(by_torch(index).storage_data)
    }
    assert all(type(one.size) is torch.Size for one in found.state_dict_metadata.values() if hasattr(one, "size"))


def test_shapes_before_flattening_stand_where_readers_look() -> None:
    index = Index({}, {}, {"w": (2, 3)})
    found = pickle.loads(encode_index(index).pickled("here", "now"))
    assert found.mcore_data == {"w": {"nd_reformulated_orig_global_shape": (2, 3)}}


def test_an_index_that_keeps_the_plans_of_its_writers_is_read(tmp_path: Path) -> None:
    metadata = Metadata({}, storage_data={})
    metadata.all_local_plans = [SavePlan([], storage_data=_StoragePrefix("__0_"))]  # type: ignore[attr-defined]
    read = load_inert(pickle.dumps(metadata), tmp_path)
    assert read.all_local_plans[0].storage_data.prefix == "__0_"


class _Looked:
    """Written as ``getattr`` of something and a name."""

    def __init__(self, owner: object, name: str) -> None:
        self._arguments = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._arguments


@pytest.mark.parametrize("protocol", [2, 4])
def test_members_of_enumerations_are_read_as_the_first_releases_of_python_3_11_wrote_them(protocol: int) -> None:
    member = _Looked(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    content = pickle.dumps([Metadata({}, storage_data={"x": 1}), member], protocol)
    read, nothing = load_inert(content, Path(".metadata"))
    assert read.storage_data == {"x": 1} and nothing is None


def test_a_value_that_is_written_as_a_call_of_getattr_is_refused_without_advice_to_allow_that(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="no load should allow that; save its value"):
        remesh.save({"w": torch.ones(1), "kind": _Looked("text", "format")}, tmp_path / "new")


@pytest.mark.parametrize("owner", [Metadata, "text", {}])
def test_no_attribute_of_anything_else_is_named(owner: object) -> None:
    with pytest.raises(CheckpointFormatError, match="what is no enumeration"):
        load_inert(pickle.dumps(_Looked(owner, "format")), Path("x"))
