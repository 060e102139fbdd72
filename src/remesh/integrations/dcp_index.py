"""Conversion between torch's ``Metadata`` and our index, for `remesh.integrations.dcp`.

torch's index holds the boxes of each tensor, and apart from these the place of each box in a file. Ours holds both
together, in columns. When a checkpoint is read, torch's planner asks for parts of boxes; each box is one read of a
file, from which all that was asked of it is filled.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError, as_checkpoint_errors
from remesh.checkpoint.formats.directory import METADATA_FNAME
from remesh.checkpoint.formats.fetch import ChunkRead, Destination
from remesh.checkpoint.formats.inert_pickle import load_inert
from remesh.checkpoint.plan.manifest import Extent, Index, IndexedTensor, Manifest, StoredTensor
from remesh.checkpoint.run.reader import OpenCheckpoint, open_checkpoint
from remesh.checkpoint.storage import Location, store_of
from remesh.foundation.torch_private import StorageInfo
from remesh.layout import Box
from remesh.layout.from_torch import dtype_name, torch_dtype

VERSION = "1.0.0"
"""The version of the metadata, as torch's writer gives it."""


def check_planner_data(planner_data: Any, directory: Location) -> None:
    """Raise `CheckpointMismatchError` if it has a class: reading the index would run code then."""
    try:
        load_inert(pickle.dumps(planner_data), directory / METADATA_FNAME)
    except CheckpointFormatError as raised:
        raise CheckpointMismatchError(
            f"saving checkpoint {directory}: the planner's data goes into the index, which is read without running "
            f"code, and holds more than numbers, texts, tuples, lists and dicts ({raised}); correct the planner"
        ) from raised


def index_of(metadata: Metadata) -> Index:
    """The index of all that torch's metadata lists."""
    index, places = Index({}, {}, {}), {}
    for where, info in metadata.storage_data.items():
        places[where.fqn, where.offset] = (info.relative_path, info.offset, info.length)
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, BytesStorageMetadata):
            index.objects[name] = places[name, None]
            continue
        chunks = [(tuple(one.offsets), tuple(one.sizes), places[name, one.offsets]) for one in found.chunks]
        index.tensors[name] = IndexedTensor(dtype_name(found.properties.dtype), tuple(found.size), chunks)
    return index


def open_native(directory: Location) -> OpenCheckpoint:
    """A checkpoint of torch's kind; `CheckpointFormatError` for one of another."""
    with as_checkpoint_errors(f"loading checkpoint {directory}"):
        checkpoint = open_checkpoint(directory, allow_native=True)
    if not checkpoint.is_native:
        raise CheckpointFormatError(
            "not-dcp",
            f"loading checkpoint {directory} with dcp: its format is {checkpoint.format}, whose common data torch's "
            f"planner does not know, expected dcp; load it with remesh.load, or convert it: remesh ckpt convert "
            f"{directory} TARGET --to dcp",
        )
    return checkpoint


def metadata_of(checkpoint: OpenCheckpoint) -> Metadata:
    """torch's metadata of a checkpoint, for its planners."""
    path = checkpoint.directory / METADATA_FNAME
    planner_data = getattr(load_inert(store_of(path).read(path), path), "planner_data", None)
    described: dict[str, Any] = {name: BytesStorageMetadata() for name in checkpoint.manifest.objects}
    described |= {name: _tensor_metadata(stored) for name, stored in checkpoint.manifest.tensors.items()}
    meta = StorageMeta(checkpoint_id=str(checkpoint.directory))
    places = {MetadataIndex(name): _info(extent) for name, extent in checkpoint.manifest.objects.items()}
    for name, stored in checkpoint.manifest.tensors.items():
        places |= {MetadataIndex(name, torch.Size(one.box.start)): _info(one.extent) for one in stored.chunks}
    return Metadata(described, planner_data=planner_data, storage_data=places, storage_meta=meta, version=VERSION)


def _info(extent: Extent) -> Any:
    return StorageInfo(extent.file, extent.file_start, extent.length_bytes)


def _tensor_metadata(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(one.box.start), torch.Size(one.box.shape)) for one in stored.chunks]
    properties = TensorProperties(dtype=torch_dtype(stored.dtype))
    return TensorStorageMetadata(properties, torch.Size(stored.global_shape), chunks)


def chunk_reads(
    checkpoint: OpenCheckpoint, items: Sequence[ReadItem], places: Sequence[torch.Tensor]
) -> list[ChunkRead]:
    """One read for every chunk that is needed at least in part, in the order of files and places in them."""
    chunks = _chunks_by_index(checkpoint.manifest, {item.storage_index.fqn for item in items})
    reads: dict[Extent, ChunkRead] = {}
    for item, place in zip(items, places, strict=True):
        name = item.storage_index.fqn
        box, extent = chunks[MetadataIndex(name, item.storage_index.offset)]
        destination = Destination(Box.at(tuple(item.storage_offsets), tuple(item.lengths)), place)
        what = f"a chunk of tensor {name!r} in {checkpoint.directory}"
        blank = ChunkRead(extent, checkpoint.manifest.tensors[name].dtype, box.shape, (), what)
        found = reads.get(extent, blank)
        reads[extent] = replace(found, destinations=(*found.destinations, destination))
    return [reads[extent] for extent in sorted(reads)]


def _chunks_by_index(manifest: Manifest, names: set[str]) -> Mapping[MetadataIndex, tuple[Box, Extent]]:
    return {
        MetadataIndex(name, torch.Size(chunk.box.start)): (chunk.box, chunk.extent)
        for name in names
        for chunk in manifest.tensors[name].chunks
    }
