"""Storage writer for native torch's planner that writes in the background, under the name that programs know.

    writer = FileSystemWriterAsync(path)
    planned, *_ = save_state_dict_async_plan(state_dict, writer)                    # strategies.state_dict_saver
    function, preload, args = writer.get_save_function_and_args()
    queue.schedule_async_request(
        AsyncRequest(function, tuple(args), [lambda: save_state_dict_async_finalize(*planned)], preload_fn=preload)
    )

So DTensor state dicts of torch go through the queue of `async_utils` like everything else. Values are copied when the
plan is made. A rank writes one file. A small file of the rank's own lists what was written, so that the function
may run in a thread or in any process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from remesh.checkpoint.checkpoint_errors import CheckpointingException, as_checkpoint_errors
from remesh.checkpoint.formats.data_file import write_data_file
from remesh.checkpoint.storage import location_of
from remesh.comm.gather import group_rank
from remesh.foundation.torch_private import StorageInfo

Row = list[Any]
"""Of an item ``[name, offset or None, number or None, bytes of values, file, first byte, length]``; JSON."""
Items = list[tuple[MetadataIndex, bytes | torch.Tensor]]
"""What a rank writes: serialised objects, then tensors."""

_results_queue = None
"""Some programs end the process of this queue with their saves; there is none."""


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Return None: results of writing are passed in files, so there is no queue to warm up."""
    return _results_queue


class FileSystemWriterAsync(FileSystemWriter):
    """Writes a plan of torch's planner, in the background if wanted. One is made for each save.

    ``separation_hint`` and ``use_msc`` are refused: files by hint and remote stores are those of
    `dist_checkpointing.save`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **options: Any,
    ) -> None:
        path = os.path.abspath(path)  # what is written later does not follow a chdir
        super().__init__(path, *args, **options)
        if not self.single_file_per_rank or use_msc or separation_hint is not None:
            raise NotImplementedError(
                f"making a writer for {path}: found single_file_per_rank={self.single_file_per_rank}, "
                f"use_msc={use_msc} and separation_hint={separation_hint!r}, expected one file per rank in a local "
                "directory; dist_checkpointing.save knows the others"
            )
        self.checkpoint_dir = path
        self.write_buckets: Items = []
        self._file = ""
        self._listing: Path | None = None
        """The file in which the function that writes lists what it has written."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy what the plan has to memory that no other code writes to."""
        self._file = f"{plan.storage_data.prefix}0.distcp"
        blobs: Items = []
        tensors: Items = []
        for item in plan.items:
            value = planner.resolve_data(item)
            if isinstance(value, torch.Tensor):
                tensors.append((item.index, value.detach().to("cpu", copy=True)))
            else:
                blobs.append((item.index, value.getvalue()))
        self.write_buckets = blobs + tensors

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """The function that writes, nothing to run before it, and its arguments; without items no function.

        The function calls no other rank.
        """
        if not self.write_buckets:
            return None, None, []
        descriptor, name = tempfile.mkstemp(prefix="written-", suffix=".json")
        os.close(descriptor)
        self._listing = Path(name)
        return write_items, None, [group_rank(), self.write_buckets, os.fspath(self.checkpoint_dir), self._file, name]

    def retrieve_write_results(self) -> list[WriteResult]:
        """What the function has written on this rank. `CheckpointingException` when it has not ended well."""
        return [result_of(row) for row in self.take_rows()]

    def take_rows(self) -> list[Row]:
        """The same as JSON, once."""
        listing, self._listing, self.write_buckets = self._listing, None, []
        if listing is None:
            return []
        text = listing.read_text()
        listing.unlink()
        if not text:
            raise CheckpointingException(
                f"saving checkpoint {self.checkpoint_dir}: the write function has returned nothing, expected it to "
                "have finished; call it before the save is finalized"
            )
        rows: list[Row] = json.loads(text)
        return rows


def write_items(rank: int, items: Items, directory: str, file: str, listing: str) -> None:
    """Write the file of a rank durably, and then, into the file ``listing``, what lies where."""
    with as_checkpoint_errors(f"saving checkpoint {directory}"):
        blobs = [value for _, value in items if isinstance(value, bytes)]
        tensors = [value for _, value in items if isinstance(value, torch.Tensor)]
        rows: list[Row] = []
        places = write_data_file(location_of(directory) / file, blobs, tensors)
        for (index, value), place in zip(items, places, strict=True):
            num_bytes = len(value) if isinstance(value, bytes) else value.nbytes
            offset = None if index.offset is None else list(index.offset)
            rows.append([index.fqn, offset, index.index, num_bytes, file, *place])
        Path(listing).write_text(json.dumps(rows))


def result_of(row: Row) -> WriteResult:
    """One item in the words of torch."""
    name, offset, number, num_bytes, file, start, length = row
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return WriteResult(index, num_bytes, StorageInfo(file, start, length))
