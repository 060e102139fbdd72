"""Save and load times of tensors on disk: one process, beside native torch DCP and plain file operations.

The bound of a save is one write and fsync of the same bytes from one buffer; that of a load is one read of them into
memory that is there. Files are in the page cache when they are loaded. Rounds of all programs alternate, the least of
each counts.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import remesh
from benchmarks.report import Row, at_least, at_most
from remesh.checkpoint.formats.index_files import IndexFiles
from remesh.checkpoint.formats.torch_format import read_manifest
from remesh.checkpoint.plan.manifest import Index, IndexedTensor
from remesh.checkpoint.run.reader import fill_tensors, open_checkpoint, plan_fill
from remesh.checkpoint.storage.integrity import read_checksums, replace_checksums
from remesh.dist_checkpointing.mapping import ShardedTensor
from remesh.layout import Box

State = dict[str, torch.Tensor]


def save_and_load(
    case: str, state: State, root: Path, repeat: int, goals: tuple[float | None, float, float | None]
) -> list[Row]:
    """Rows of one state; goals of a save over the bound, and of DCP's save and load over ours."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    content = memoryview(bytearray(os.urandom(1 << 16) * (num_bytes // (1 << 16) + 1)))[:num_bytes]
    saves = alternate(
        [
            lambda at: remesh.save(state, root / f"ours{at}"),
            lambda at: native_save(state, root / f"native{at}"),
            lambda at: _write_raw(root / f"raw{at}", content),
        ],
        repeat,
    )
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    buffer = bytearray(num_bytes)
    loads = alternate(
        [
            lambda at: remesh.load(dict(target), root / "ours0"),
            lambda at: native_load(dict(target), root / "native0"),
            lambda at: read_raw(root / "raw0", buffer),
        ],
        repeat,
    )
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    over_raw = saves[0] / saves[2]
    rows = [
        at_most(f"{case}: save over raw write and fsync", over_raw, "ratio", goals[0], bound=1.0),
        at_least(f"{case}: save, DCP over ours", saves[1] / saves[0], "ratio", goals[1], peer="torch DCP"),
        Row(f"{case}: load over raw read", loads[0] / loads[2], "ratio", bound=1.0),
        Row(f"{case}: save", saves[0], "s"),
        Row(f"{case}: load", loads[0], "s"),
    ]
    if goals[2] is not None:
        rows.append(at_least(f"{case}: load, DCP over ours", loads[1] / loads[0], "ratio", goals[2], peer="torch DCP"))
    _clear(root)
    return rows


def parts_of_a_chunk(side: int, root: Path, repeat: int) -> list[Row]:
    """An eighth of the rows, and of the columns, of one square matrix that was saved as one chunk."""
    matrix = torch.randn(side, side)
    remesh.save({"w": matrix}, root / "ours0")
    native_save({"w": matrix}, root / "native0")
    size = f"{matrix.nbytes >> 20} MiB"
    rows = []
    for what, shape in (("rows", (side // 8, side)), ("columns", (side, side // 8))):
        box = Box.at(tuple(3 * n if n < side else 0 for n in shape), shape)
        ours, theirs = torch.zeros(shape), _Part.of(box, (side, side))
        num_read: list[int] = []

        def load_ours(at: int, ours: torch.Tensor = ours, box: Box = box, num_read: list[int] = num_read) -> None:
            num_read.append(_load_part(root / "ours0", ours, box))

        seconds = alternate([load_ours, lambda at, t=theirs: native_load({"w": t}, root / "native0")], repeat)  # type: ignore[misc]
        assert torch.equal(ours, matrix[box.slices()])
        assert torch.equal(theirs.as_subclass(torch.Tensor), ours)
        case = f"an eighth of the {what} of {size}"
        rows.append(at_least(f"{case}: DCP over ours", seconds[1] / seconds[0], "ratio", 5.0, peer="torch DCP"))
        over = num_read[0] / (box.size * 4)
        rows.append(
            at_most(f"{case}: bytes read over wanted", over, "ratio", 1.1)
            if what == "rows"
            else Row(f"{case}: bytes read over wanted", over, "ratio", bound=1.0)
        )
    _clear(root)
    return rows


def reading_the_index(num_ranks: int, num_tensors: int, root: Path, repeat: int) -> list[Row]:
    """The two forms of an index of tensors that are cut into a chunk for each rank."""
    tensors = {}
    for number in range(num_tensors):
        rows = [((8 * rank, 0), (8, 64), (f"__{rank}_0.distcp", 1600 * number, 1600)) for rank in range(num_ranks)]
        tensors[f"layers.{number}.weight"] = IndexedTensor("bfloat16", (8 * num_ranks, 64), rows)
    for name, content in IndexFiles.of(Index(tensors, {}, {})).contents(root).items():
        (root / name).write_bytes(content)
    replace_checksums(root)
    checksums = read_checksums(root)
    columns, pickled = alternate([lambda at: read_manifest(root, checksums), lambda at: read_manifest(root)], repeat)
    _clear(root)
    case = f"an index of {num_ranks * num_tensors} chunks"
    return [
        Row(f"{case}: load, the pickle over the columns", pickled / columns, "ratio"),
        Row(f"{case}: load", columns, "s"),
    ]


class _Part(torch.Tensor):
    """A box of a tensor, in the protocol by which DCP loads any kind of sharding."""

    _box: Box
    _global_shape: tuple[int, ...]

    @staticmethod
    def of(box: Box, global_shape: tuple[int, ...]) -> _Part:
        part: _Part = torch.zeros(box.shape).as_subclass(_Part)  # type: ignore[assignment]
        part._box, part._global_shape = box, global_shape
        return part

    def size(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self._global_shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self._box.start), torch.Size(self._box.shape))]

    def __create_write_items__(self, fqn: str, value: object) -> list[object]:
        raise NotImplementedError("only loaded")

    def __get_tensor_shard__(self, index: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _load_part(directory: Path, place: torch.Tensor, box: Box) -> int:
    """Open, plan and read; returns the bytes that were read of the data file."""
    checkpoint = open_checkpoint(directory)
    shape = checkpoint.manifest.tensors["w"].global_shape
    fill = plan_fill(checkpoint, [ShardedTensor("w", place, place.dtype, box.shape, shape, box.start, None)])
    return fill_tensors(checkpoint, fill)


def native_save(state: State, directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)


def native_load(state: dict[str, object], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=directory, no_dist=True)


def _write_raw(path: Path, content: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def read_raw(path: Path, buffer: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        file.readinto(buffer)


def alternate(acts: Sequence[Callable[[int], object]], repeat: int) -> list[float]:
    """Least seconds of each act over some rounds."""
    best = [float("inf")] * len(acts)
    for at in range(repeat):
        for index, act in enumerate(acts):
            started = time.perf_counter()
            act(at)
            best[index] = min(best[index], time.perf_counter() - started)
    return best


def _clear(root: Path) -> None:
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
