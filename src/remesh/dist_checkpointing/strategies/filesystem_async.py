"""A writer for native torch's planner that writes in the background, under the name that programs know.

    writer = FileSystemWriterAsync(path)
    planned, *cached = save_state_dict_async_plan(state_dict, writer)               # strategies.state_dict_saver
    function, preload, args = writer.get_save_function_and_args()
    queue.schedule_async_request(
        AsyncRequest(function, tuple(args), [lambda: save_state_dict_async_finalize(*planned)], preload_fn=preload)
    )

So DTensor state dicts of torch go through the queue of `async_utils` like everything else. Values are copied when the
plan is made. A rank writes one file, with ``separation_hint`` two. What was written is told in a small file of the
rank's own, so that the function may run in a thread or in any process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from remesh.checkpoint.errors import CheckpointingException, told_as_checkpoint_errors
from remesh.checkpoint.formats.data_file import write_data_file
from remesh.checkpoint.storage import location_of
from remesh.comm.gather import group_rank
from remesh.foundation.torch_private import StorageInfo, StoragePrefix

Row = list[Any]
"""Of an item ``[name, offset or None, number or None, bytes of values, file, first byte, length]``; JSON."""


_results_queue = None
"""Some programs end the process of this queue with their saves; there is none."""


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Return None: results of writing are passed in files, so there is no queue to warm up."""
    return _results_queue


@dataclass(frozen=True, slots=True)
class Bucket:
    """What goes into one file of a rank."""

    file: str
    objects: list[tuple[MetadataIndex, bytes]]
    tensors: list[tuple[MetadataIndex, torch.Tensor]]


class FileSystemWriterAsync(FileSystemWriter):
    """Writes a plan of torch's planner, in the background if wanted. One is made for each save.

    Keys that start with ``separation_hint`` go to a file of their own. ``use_msc`` is refused: remote stores are those
    of `dist_checkpointing.save`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(path, *args, **options)
        if not self.single_file_per_rank or use_msc:
            raise NotImplementedError(
                f"making a writer for {path}: found single_file_per_rank={self.single_file_per_rank} and "
                f"use_msc={use_msc}, expected one file per rank in a local directory"
            )
        self.checkpoint_dir = path
        self.separation_hint = separation_hint
        self.can_run_decentralized_global_plan = True
        self.write_buckets: list[Bucket] = []
        self._told: Path | None = None
        """Where the function that writes tells what it has written."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy what the plan says to memory that nobody else writes to."""
        prefix = plan.storage_data.prefix if plan.storage_data is not None else f"__{group_rank()}_"
        buckets: dict[str, Bucket] = {}
        for item in plan.items:
            hint = self.separation_hint or ""
            start = hint if item.index.fqn.startswith(hint) else ""
            number = int(bool(start) and "" in buckets)
            bucket = buckets.setdefault(start, Bucket(f"{start}{prefix}{number}.distcp", [], []))
            value = planner.resolve_data(item)
            if isinstance(value, torch.Tensor):
                bucket.tensors.append((item.index, value.detach().to("cpu", copy=True)))
            else:
                assert item.type is WriteItemType.BYTE_IO
                bucket.objects.append((item.index, value.getvalue()))
        self.write_buckets = list(buckets.values())

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """The function that writes, nothing to run before it, and its arguments; without items no function.

        The function calls no other rank.
        """
        if not self.write_buckets:
            return None, None, []
        descriptor, name = tempfile.mkstemp(prefix="written-", suffix=".json")
        os.close(descriptor)
        self._told = Path(name)
        return write_buckets, None, [group_rank(), self.write_buckets, os.fspath(self.checkpoint_dir), name]

    def retrieve_write_results(self) -> list[WriteResult]:
        """What the function has written on this rank. `CheckpointingException` when it has not ended well."""
        return [result_of(row) for row in self.take_rows()]

    def take_rows(self) -> list[Row]:
        """The same as JSON, once."""
        told, self._told, self.write_buckets = self._told, None, []
        if told is None:
            return []
        text = told.read_text()
        told.unlink()
        if not text:
            raise CheckpointingException(
                f"saving checkpoint {self.checkpoint_dir}: the write function has returned nothing, expected it to "
                "have finished; call it before the save is finalized"
            )
        rows: list[Row] = json.loads(text)
        return rows

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """The plan with the name of this rank's files, without asking other ranks."""
        return replace(local_plan, storage_data=StoragePrefix(f"__{group_rank()}_"))


def write_buckets(rank: int, buckets: Sequence[Bucket], directory: str, told: str) -> None:
    """Write the files of a rank durably, and then, into the file ``told``, what lies where."""
    doing = f"saving checkpoint {directory}"
    rows: list[Row] = []
    with told_as_checkpoint_errors(doing):
        for bucket in buckets:
            blobs, tensors = [blob for _, blob in bucket.objects], [tensor for _, tensor in bucket.tensors]
            places = write_data_file(location_of(directory) / bucket.file, blobs, tensors)
            sizes = [*map(len, blobs), *(tensor.nbytes for tensor in tensors)]
            indices = [index for index, _ in (*bucket.objects, *bucket.tensors)]
            for index, num_bytes, place in zip(indices, sizes, places, strict=True):
                offset = None if index.offset is None else list(index.offset)
                rows.append([index.fqn, offset, index.index, num_bytes, bucket.file, *place])
        Path(told).write_text(json.dumps(rows))


def result_of(row: Row) -> WriteResult:
    """One item in the words of torch."""
    name, offset, number, num_bytes, file, start, length = row
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return WriteResult(index, num_bytes, StorageInfo(file, start, length))
