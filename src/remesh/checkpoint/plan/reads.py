"""Read plan of a load: the stored chunks that fill the wanted boxes, from the manifest alone.

Definitions. A *want* is a box of a global tensor that a rank asks for. A *copy* takes a box of a chunk to a want.
A *read* is one chunk with all its copies: it is fetched once, whatever number of wants it serves.

Algorithm, for each key:

1. The stored chunks and the wants are two layouts of one tensor; the files are holders like ranks.
2. Their overlap gives the slices. Each is copied from the first chunk that has it to every want that needs it.
   Of a single want that equals a chunk the overlap is that chunk.
3. If the slices do not add up to the wants, the boxes that no chunk holds are an error, unless the want allows
   the shapes to differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.plan.manifest import Extent, Manifest, StoredChunk, StoredTensor
from remesh.checkpoint.values.nests import named
from remesh.layout import Box, Layout, Shard, compute_missing, compute_overlap

_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a global tensor to be filled."""

    key: str
    box: Box
    global_shape: tuple[int, ...]
    """Shape of the global tensor as the asking program knows it."""
    allow_shape_mismatch: bool = False
    """Whether the stored global shape may differ; what is not stored is then left as it is."""


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """Elements to move from a chunk to a want."""

    box: Box
    """In global coordinates. Invariant: inside the chunk's box and the want's."""
    want: int
    """Position of the want in the sequence that was planned."""


@dataclass(frozen=True, slots=True)
class Read:
    """One chunk to fetch, and where its elements go."""

    key: str
    dtype: str
    chunk: StoredChunk
    copies: tuple[ChunkCopy, ...]


def plan_reads(wants: Sequence[Want], manifest: Manifest) -> tuple[Read, ...]:
    """The reads that fill all wants, in order of files and offsets.

    Raises `CheckpointMismatchError` naming every key, shape or box that the checkpoint does not have.
    """
    wants_of: dict[str, list[int]] = {}
    for index, want in enumerate(wants):
        wants_of.setdefault(want.key, []).append(index)
    _check_known(wants_of, manifest)
    reads: list[Read] = []
    problems: list[str] = []
    for key, indices in wants_of.items():
        stored = manifest.tensors[key]
        problem = _shape_problem(key, [wants[index] for index in indices], stored)
        if problem is None:
            planned, problem = _plan_tensor(key, {index: wants[index] for index in indices}, stored)
            reads += planned
        if problem is not None:
            problems.append(problem)
    if problems:
        raise CheckpointMismatchError(_listed(problems))
    return tuple(sorted(reads, key=lambda read: read.chunk.extent))


def find_objects(unique_keys: Sequence[str], manifest: Manifest) -> list[Extent]:
    """The extent of the blob of each object; `CheckpointMismatchError` if an object is not stored."""
    absent = [key for key in unique_keys if key not in manifest.objects]
    if absent:
        raise CheckpointMismatchError(_absent("object", absent, list(manifest.objects)))
    return [manifest.objects[key] for key in unique_keys]


def _check_known(wants_of: Mapping[str, list[int]], manifest: Manifest) -> None:
    absent = [key for key in wants_of if key not in manifest.tensors]
    if absent:
        raise CheckpointMismatchError(_absent("tensor", absent, list(manifest.tensors)))
    flattened = sorted((manifest.flattened - manifest.unflattened_shapes.keys()).intersection(wants_of))
    if flattened:
        raise CheckpointMismatchError(
            f"{len(flattened)} wanted tensors, {named(flattened)}, are stored flattened within "
            "grid cells by an older writer (flattened_range), expected unflattened ones; save the checkpoint anew "
            "without a flattening optimizer"
        )


def _shape_problem(key: str, wants: Sequence[Want], stored: StoredTensor) -> str | None:
    for want in wants:
        same_ndim = len(want.global_shape) == len(stored.global_shape)
        if want.global_shape != stored.global_shape and not (want.allow_shape_mismatch and same_ndim):
            return (
                f"Global shape mismatch for loaded ({stored.global_shape}) and expected ({want.global_shape}) tensor "
                f"for key {key}"
            )
    return None


def _plan_tensor(key: str, wants: Mapping[int, Want], stored: StoredTensor) -> tuple[list[Read], str | None]:
    if len(wants) == 1:  # most requests are for a box as it was stored: there is nothing to cut
        ((index, want),) = wants.items()
        same = next((chunk for chunk in stored.chunks if chunk.box == want.box), None)
        if same is not None and not want.box.is_empty:
            return [Read(key, stored.dtype, same, (ChunkCopy(want.box, index),))], None
    shapes = [stored.global_shape, *(want.global_shape for want in wants.values())]
    frame = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    chunk_of = {f"chunk:{index}": chunk for index, chunk in enumerate(stored.chunks)}
    want_of = {f"want:{index}": index for index in wants}
    src = Layout(frame, tuple(Shard(name, chunk.box) for name, chunk in chunk_of.items()), stored.dtype)
    dst = Layout(frame, tuple(Shard(name, wants[index].box) for name, index in want_of.items()), stored.dtype)
    copies: dict[str, list[ChunkCopy]] = {}
    num_filled = 0
    for part in compute_overlap(src, dst, name=key):
        giver = str(part.givers[0].holder)
        for taker in part.takers:
            copies.setdefault(giver, []).append(ChunkCopy(part.box, want_of[str(taker.holder)]))
            num_filled += part.box.size
    reads = [Read(key, stored.dtype, chunk_of[giver], tuple(moved)) for giver, moved in copies.items()]
    strict = not any(want.allow_shape_mismatch for want in wants.values())
    if strict and num_filled != sum(want.box.size for want in wants.values()):
        boxes = compute_missing(src, dst)
        return [], f"tensor {key!r}: {len(boxes)} requested boxes are in no stored chunk, the first is {boxes[0]}"
    return reads, None


def _absent(kind: str, absent: Sequence[str], present: Sequence[str]) -> str:
    near = difflib.get_close_matches(absent[0], present, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "; is it the checkpoint of another model?"
    return (
        f"{len(absent)} wanted {kind}s are not in the checkpoint, {named(absent)}; it holds "
        f"{len(present)}, {named(present)}{hint}"
    )


def _listed(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
    listed = "; ".join(problems[:_MAX_LISTED])
    return f"{listed}{more}; is it the checkpoint of another model?"
