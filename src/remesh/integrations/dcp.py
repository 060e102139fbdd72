"""torch's own ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` with the files of Remesh: one argument changes.

    dcp.save(state, storage_writer=DcpWriter(path))
    dcp.load(state, storage_reader=DcpReader(path))

Planners stay torch's or the user's; their plans are carried out unchanged. What lies on disk is a checkpoint of native
torch with block checksums and our index beside it, committed in one step, so that `remesh.load`, ``remesh ckpt`` and
torch's ``FileSystemReader`` read it too.

Values that are no tensors are pickles, made and unpickled by torch's planner. Nothing here unpickles. With
`Pickles.SAFE` a writer refuses what ``torch.load(weights_only=True)`` would not read back, and a reader hands a
pickle to a planner only when it holds nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError, as_checkpoint_errors
from remesh.checkpoint.formats.data_file import check_object, load_object, write_data_file
from remesh.checkpoint.formats.directory import begin, check_can_save, finish, lone_file_name
from remesh.checkpoint.formats.fetch import fetch, read_blobs
from remesh.checkpoint.formats.index_files import stage_native_index
from remesh.checkpoint.formats.torch_format import check_files
from remesh.checkpoint.run.reader import OpenCheckpoint, check_are_writable, check_own_places
from remesh.checkpoint.storage import Directory, Location, is_location, location_of
from remesh.checkpoint.storage.save_lock import SaveLock, held
from remesh.checkpoint.values.entities import check_has_values
from remesh.foundation.errors import ConfigError
from remesh.foundation.torch_private import StorageInfo, never_compiled
from remesh.integrations.dcp_index import VERSION, check_planner_data, chunk_reads, index_of, metadata_of, open_native


class Pickles(Enum):
    """What the values beside tensors may be."""

    SAFE = "safe"
    """Values that can be read without running code, and classes of ``torch.serialization.add_safe_globals``."""
    ANY = "any"
    """Any values: torch's planner unpickles them, and runs the code in them. For files that only you can write."""


@never_compiled
class DcpWriter(StorageWriter):
    """Where ``dcp.save`` writes: the directory or URL ``path``, or the ``checkpoint_id`` of the call.

    A checkpoint is there in full or not at all; an existing one is never overwritten. All ranks must see the directory.
    """

    def __init__(self, path: Directory | None = None, *, pickles: Pickles = Pickles.SAFE) -> None:
        self._directory = None if path is None else location_of(path)
        self._pickles = pickles
        self._rank = 0
        self._save_lock: SaveLock | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        self._save_lock = None
        if checkpoint_id is not None:
            self._directory = location_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "saving with dcp: use_collectives=False makes one checkpoint for each rank, which Remesh cannot commit "
                "as one; leave the argument out"
            )
        self._rank = kwargs.get("rank", 0)
        self._save_lock = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        directory = self._place()
        with as_checkpoint_errors(f"saving checkpoint {directory}"):
            check_can_save(directory, may_create=True)
            self._save_lock = begin(directory)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        directory = self._place()
        blobs = [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
        boxes = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        objects = [self._bytes_of(item, planner) for item in blobs]
        tensors = [_tensor_of(item, planner) for item in boxes]
        # A planner may take an older plan out of its cache, so nothing in a plan is of this save: a name that
        # no other save gives keeps its files apart from those of a save that was given up on.
        name = lone_file_name(self._rank)
        places: Sequence[tuple[int, int]] = ()
        if plan.items:
            # Where torch prepares the plan of all, it is known whose lock it is.
            lock, doing = self._save_lock, f"saving checkpoint {directory}"
            with as_checkpoint_errors(doing) if lock is None else held(lock):
                places = write_data_file(directory / name, objects, tensors)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(item.index, length, StorageInfo(name, start, length))
                for item, (start, length) in zip([*blobs, *boxes], places, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._save_lock is not None, "torch prepares a plan on the coordinator before it finishes"
        lock, self._save_lock = self._save_lock, None
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        metadata.storage_meta = self.storage_meta()
        metadata.version = VERSION
        check_planner_data(metadata.planner_data, lock.directory)
        with held(lock):
            stage_native_index(lock, index_of(metadata), pickle.dumps(metadata))
        finish(lock, None)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """Where it writes, as torch's log of a save shows it."""
        return str(self._place())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return is_location(checkpoint_id)

    def _place(self) -> Location:
        return _given(self._directory, "saving")

    def _bytes_of(self, item: WriteItem, planner: SavePlanner) -> bytes:
        data = planner.resolve_data(item)
        assert isinstance(data, io.BytesIO), "torch asks planners for a buffer"
        blob = data.getvalue()
        if self._pickles is Pickles.SAFE and _is_pickle(blob):
            check_object(blob, f"{item.index.fqn!r}")
        return blob


@never_compiled
class DcpReader(StorageReader):
    """What ``dcp.load`` reads: a checkpoint of torch DCP in the directory or URL ``path``, by any writer.

    Its index is read without unpickling; blocks with a checksum are compared with it.
    """

    def __init__(self, path: Directory | None = None, *, pickles: Pickles = Pickles.SAFE) -> None:
        self._directory = None if path is None else location_of(path)
        self._pickles = pickles
        self._opened: OpenCheckpoint | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        self._opened = None
        if checkpoint_id is not None:
            self._directory = location_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        self._opened = open_native(_given(self._directory, "loading"))
        return metadata_of(self._opened)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._opened is None:
            self._opened = open_native(_given(self._directory, "loading"))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._opened is not None, "torch sets the reader up before it reads"
        checkpoint = self._opened
        of_bytes = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        of_tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        extents = [checkpoint.manifest.objects[item.storage_index.fqn] for item in of_bytes]
        places = [planner.resolve_tensor(item).detach() for item in of_tensors]
        _check_places(of_tensors, places)
        reads = chunk_reads(checkpoint, of_tensors, places)
        check_files(checkpoint.directory, [*(read.extent for read in reads), *extents])
        with as_checkpoint_errors(f"loading checkpoint {checkpoint.directory}"):
            for item, blob in zip(of_bytes, read_blobs(checkpoint.checksums, extents), strict=True):
                self._give_bytes(item, blob, planner)
            fetch(checkpoint.checksums, reads)
        increment_version(places)  # a backward pass that has saved their values is refused
        for item, place in zip(of_tensors, places, strict=True):
            planner.commit_tensor(item, place)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str:
        """Where it reads, as torch's log of a load shows it."""
        return str(_given(self._directory, "loading"))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return is_location(checkpoint_id)

    def _give_bytes(self, item: ReadItem, blob: bytes, planner: LoadPlanner) -> None:
        # torch's planner unpickles whatever it is given, and others may hand a pickle on to it.
        unpickles = type(planner).load_bytes is DefaultLoadPlanner.load_bytes
        if self._pickles is Pickles.SAFE and (unpickles or _is_pickle(blob)):
            load_object(blob, f"{item.storage_index.fqn!r} of {self.checkpoint_id}")
        planner.load_bytes(item, io.BytesIO(blob))


def _check_places(items: Sequence[ReadItem], places: Sequence[torch.Tensor]) -> None:
    """Raise `CheckpointMismatchError` for what cannot be filled; torch raises it on all ranks."""
    named = [(item.dest_index.fqn, place) for item, place in zip(items, places, strict=True)]
    for name, place in named:
        check_own_places(place, name)
    check_are_writable(named)


def _given(directory: Location | None, doing: str) -> Location:
    if directory is None:
        raise ConfigError(f"{doing} with dcp: no directory is given; give a path to Remesh's class, or a checkpoint_id")
    return directory


def _is_pickle(blob: bytes) -> bool:
    """Whether ``torch.save`` made these bytes: each of its files is a zip archive."""
    return blob.startswith(b"PK")


def _tensor_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    data = item.tensor_data
    assert isinstance(tensor, torch.Tensor) and data is not None, "torch plans a box for every tensor"
    tensor = tensor.detach()
    check_has_values(tensor, item.index.fqn)
    found, expected = (tensor.dtype, tensor.shape), (data.properties.dtype, data.chunk.sizes)
    if found != expected:
        raise CheckpointMismatchError(
            f"saving tensor {item.index.fqn!r} with dcp: its planner gave {found[0]} of shape {tuple(found[1])}, "
            f"expected {expected[0]} of shape {tuple(expected[1])} as it had planned; correct the planner"
        )
    return tensor
