"""Strategies of the format ``zarr``: every shard is the cell of a grid, in a file of its own.

A save sends the list of cells to all ranks, lets the first one describe the arrays, and then each rank write its
cells. Flattened slices are first moved to whole cells, each on the rank that has its beginning: a reshard. A load finds
the arrays of a checkpoint and goes the way of every load: any layout from any grid. The bytes are the business of
``strategies.zarr_format``.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import (
    CheckpointMismatchError,
    as_checkpoint_errors,
)
from remesh.checkpoint.formats.data_file import dump_object
from remesh.checkpoint.formats.directory import FIXED_FNAMES, check_seen
from remesh.checkpoint.formats.zarr_format import (
    BACKEND,
    BACKEND_VERSION,
    Array,
    array_of,
    check_places,
    write_array,
    write_cell,
    write_object,
)
from remesh.checkpoint.run.collective_steps import take_first_step, take_step
from remesh.checkpoint.run.writer import commit_native, save_under_way
from remesh.checkpoint.storage import Directory, location_of, store_of
from remesh.checkpoint.storage.integrity import BLOCKS_FNAME, TABLE_BLOCK_BYTES, Trailer, write_blocks
from remesh.checkpoint.storage.save_lock import SaveLock, held
from remesh.checkpoint.values.entities import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from remesh.checkpoint.values.nests import nested_values
from remesh.comm.gather import Group, gather_from, group_rank
from remesh.dist_checkpointing.strategies.base import (
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from remesh.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from remesh.layout import Shard, boxes_of_flat_range
from remesh.layout.from_torch import Piece, dtype_name
from remesh.resharding.reshard_api import reshard

_Row = Sequence[Any]
"""``(key, dtype, global shape, shape of the cell)`` of a shard."""


class ZarrSaveShardedStrategy(SaveShardedStrategy):
    """Writes ``zarr``: shards of a regular grid, each by its main replica, and objects."""

    can_handle_sharded_objects = raises_everywhere = True
    _writes = (BACKEND, BACKEND_VERSION)

    def __init__(self, backend: str = BACKEND, version: int = BACKEND_VERSION) -> None:
        super().__init__(backend, version)

    def check_can_save(self, sharded_state_dict: ShardedStateDict) -> Mapping[str, bytes]:
        """See that every object can be read back, and every tensor has a place in a grid."""
        part = _part_of(sharded_state_dict)
        for shard in (*part.tensors, *part.slices):
            _row_of(shard)
        return part.blobs()

    def save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory, *, process_group: Group = None
    ) -> None:
        """Write this rank's cells and objects; the first rank also the arrays. Blocks until all have written."""
        directory = location_of(checkpoint_dir)
        doing = f"saving checkpoint {directory}"
        under_way = save_under_way(directory, process_group)
        lock = under_way.lock
        part = _whole_cells(_part_of(sharded_state_dict), process_group, doing)
        by_rank = take_step(part.names, process_group, doing, tell=list).told
        rows = [row for of_rank, _ in by_rank for row in of_rank]
        objects = {name for _, of_rank in by_rank for name in of_rank}

        def begin() -> tuple[dict[str, Array], dict[str, Trailer]]:
            arrays, tables = _arrays_of(rows), {}
            check_places(arrays, objects, FIXED_FNAMES)
            with held(lock):
                for key, one in arrays.items() if group_rank(process_group) == 0 else ():
                    tables.update(write_array(lock, key, one))
            return arrays, tables

        arrays, tables = take_step(begin, process_group, doing).mine
        written = take_step(
            lambda: {**tables, **part.write(lock, arrays)},
            process_group,
            doing,
            tell=lambda made: [[name, table.data_bytes, table.crcs.tolist()] for name, table in made.items()],
        ).told
        everything = {name: _table(*names) for one in written for name, *names in one}

        def end() -> None:
            with held(lock):
                check_seen(directory, [lock.staged_name(of_rank[0][0]) for of_rank in written if of_rank])
                write_blocks(lock.staged(BLOCKS_FNAME), everything)

        take_first_step(end, process_group, doing)
        if under_way.is_lone:
            take_step(lambda: commit_native(lock, process_group), process_group, doing)


class ZarrLoadShardedStrategy(TorchDistLoadShardedStrategy):
    """Reads ``zarr`` without compression, as this package and Megatron Core write it."""

    _reads = (BACKEND, BACKEND_VERSION)

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        raise NotImplementedError(
            f"removing tensors of {checkpoint_dir}: it is in format zarr, whose tensors are directories; convert it "
            "with remesh ckpt convert"
        )


def load_zarr_based_sharded_metadata(checkpoint_dir: Directory) -> dict[str, ShardedTensor | ShardedObject]:
    """Every tensor of a checkpoint in this format as one shard without data, and every object by its unique key."""
    return ZarrLoadShardedStrategy().load_sharded_metadata(checkpoint_dir)


def _table(num_bytes: int, crcs: list[int]) -> Trailer:
    return Trailer(TABLE_BLOCK_BYTES, num_bytes, array("I", crcs))


def register_default_zarr_strategies() -> None:
    """Make these the strategies for ``("zarr", 1)``; done when the module is imported."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, BACKEND_VERSION, ZarrSaveShardedStrategy())
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, BACKEND_VERSION, ZarrLoadShardedStrategy())


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank writes."""

    tensors: list[ShardedTensor]
    slices: list[ShardedTensor]
    """Flattened ones, not empty."""
    objects: list[ShardedObject]

    def names(self) -> tuple[list[_Row], list[str]]:
        """All that other ranks need to know: the row of each tensor, and the unique key of each object."""
        return [_row_of(shard) for shard in self.tensors], [one.unique_key for one in self.objects]

    def blobs(self) -> dict[str, bytes]:
        return {one.unique_key: dump_object(one.data, f"object {one.unique_key!r}") for one in self.objects}

    def write(self, lock: SaveLock, arrays: Mapping[str, Array]) -> dict[str, Trailer]:
        tables: dict[str, Trailer] = {}
        store = store_of(lock.directory)
        with held(lock):
            for place in dict.fromkeys(lock.directory / shard.key for shard in self.tensors):
                if not store.is_directory(place):  # another rank has made it, if this one was given the same path
                    store.make_directory(place)
            for shard in self.tensors:
                values = shard.data_in_box()
                tables.update(write_cell(lock, shard.key, arrays[shard.key], shard.global_box(), values))
            for name, blob in self.blobs().items():
                tables.update(write_object(lock, name, blob))
        return tables


def _part_of(sharded_state_dict: ShardedStateDict) -> _Part:
    entities = [one for one in nested_values(sharded_state_dict) if is_main_replica(one.replica_id)]
    tensors = [one for one in entities if isinstance(one, ShardedTensor)]
    slices = [one for one in tensors if one.flattened_range is not None and one.data_shape[0]]
    whole = [one for one in tensors if one.flattened_range is None]
    filled = [one for one in whole if 0 in one.global_shape or not one.global_box().is_empty]
    return _Part(filled, slices, [one for one in entities if isinstance(one, ShardedObject)])


def _whole_cells(part: _Part, group: Group, doing: str) -> _Part:
    """The part with whole cells in the place of slices. Called by every rank; blocks until all have what is theirs."""
    if not any(gather_from(lambda: len(part.slices), group, doing)):
        return part
    give: dict[str, Piece] = {}
    take: dict[str, Piece] = {}
    cells: list[ShardedTensor] = []
    for key in dict.fromkeys(one.key for one in part.slices):
        slices = [one for one in part.slices if one.key == key]
        give[key] = _piece_of_slices(slices)
        owned = [one for one in slices if one.flattened_range is not None and one.flattened_range.start == 0]
        if not owned:
            continue
        num_elements = owned[0].global_box().size
        buffer = give[key].tensor.new_empty(len(owned) * num_elements)
        shards = [Shard(0, one.global_box(), at * num_elements) for at, one in enumerate(owned)]
        take[key] = Piece(buffer, owned[0].global_shape, tuple(shards))
        for at, one in enumerate(owned):
            values = buffer[at * num_elements : (at + 1) * num_elements].view(one.local_shape)
            cells.append(replace(one, data=values, flattened_range=None))
    with as_checkpoint_errors(doing):
        reshard(give, take, group=group)
    return _Part([*part.tensors, *cells], [], part.objects)


def _piece_of_slices(slices: Sequence[ShardedTensor]) -> Piece:
    """Describe this rank's slices of one tensor as one `Piece`."""
    shards, at = [], 0
    for one in slices:
        held = one.flattened_range
        assert held is not None
        for box in boxes_of_flat_range(one.global_box(), held.start, held.stop):
            shards.append(Shard(0, box, at))
            at += box.size
    data = [one.data.detach() for one in slices if one.data is not None]
    return Piece(data[0] if len(data) == 1 else torch.cat(data), slices[0].global_shape, tuple(shards))


def _row_of(shard: ShardedTensor) -> _Row:
    box = shard.global_box()
    if any(size and at % size for at, size in zip(box.start, box.shape, strict=True)):
        raise CheckpointMismatchError(
            f"saving tensor {shard.key!r} as zarr: its shard {box} is no cell of a regular grid; save it as torch_dist"
        )
    return [shard.key, dtype_name(shard.dtype), shard.global_shape, box.shape]


def _arrays_of(rows: Sequence[_Row]) -> dict[str, Array]:
    """The array of each key; all ranks find the same, or raise the same."""
    arrays: dict[str, Array] = {}
    for key, dtype, shape, cell_shape in rows:
        found = array_of(key, dtype, tuple(shape), tuple(cell_shape))
        known = arrays.setdefault(key, found)
        if known != found:
            raise CheckpointMismatchError(
                f"saving tensor {key!r} as zarr: one shard is a cell of {known.cell_shape} of {known.shape}, another "
                f"of {found.cell_shape} of {found.shape}, expected cells of one shape; save it as torch_dist"
            )
    return arrays


register_default_zarr_strategies()
