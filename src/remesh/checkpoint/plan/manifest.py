"""Manifest of a checkpoint: tensors, objects and the file extents of their chunks, free of any format's classes.

Definitions. A *blob* is one serialised tensor or object. An *extent* is the byte range of a file that a blob fills. A
*chunk* is a box of a global tensor with the extent of its blob. Format edges turn their own metadata into a `Manifest`
and back; planning what to read looks at manifests only. An `Index` holds the same in plain tuples, for writing: of a
million chunks it costs a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from remesh.layout import Box


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """The file and byte range of a blob."""

    file: str
    """Path relative to the checkpoint directory, not leaving it (held by the format edge)."""
    file_start: int
    """First byte of the blob in the file."""
    length_bytes: int

    @property
    def file_stop(self) -> int:
        """One past the last byte of the blob."""
        return self.file_start + self.length_bytes

    def __str__(self) -> str:
        return f"{self.file}[{self.file_start}:{self.file_stop}]"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A stored box of a global tensor."""

    box: Box
    extent: Extent
    bare_shape: tuple[int, ...] | None = None
    """None where the extent holds a blob of torch. Else it holds bare elements, row-major, of this shape, which is that
    of the box, or larger at the end of a grid."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A global tensor on disk."""

    dtype: str
    """Name as in `remesh.layout`: ``"float32"``."""
    global_shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    """In the order of the metadata. Invariant: each inside the global box."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a checkpoint holds besides common data."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Extent]
    """By unique key, ``KEY/shard_OFFSET_SHAPE``."""
    flattened: frozenset[str] = field(default_factory=frozenset)
    """Keys of tensors that an older writer stored flattened within each grid cell, in another global shape."""
    unflattened_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The global shape before flattening, of each key in ``flattened`` for which it is known."""
    has_bare_objects: bool = False
    """Whether the blob of an object holds the object itself, not a list of all that one rank had under its name."""

    def extents(self) -> Iterator[Extent]:
        """Every blob."""
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                yield chunk.extent
        yield from self.objects.values()

    def to_index(self) -> Index:
        """The same, for writing."""
        return Index(
            {
                key: IndexedTensor(
                    tensor.dtype,
                    tensor.global_shape,
                    [(chunk.box.start, chunk.box.shape, _place(chunk.extent)) for chunk in tensor.chunks],
                )
                for key, tensor in self.tensors.items()
            },
            {key: _place(extent) for key, extent in self.objects.items()},
            dict(self.unflattened_shapes),
        )


Place = tuple[str, int, int]
"""File, first byte and length of a blob."""
StoredBox = tuple[tuple[int, ...], tuple[int, ...], Place]
"""Offset and shape of a box, and where its blob lies."""


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A global tensor on disk."""

    dtype: str
    global_shape: tuple[int, ...]
    chunks: list[StoredBox]


@dataclass(frozen=True, slots=True)
class Index:
    """Everything a checkpoint is going to hold besides common data."""

    tensors: dict[str, IndexedTensor]
    objects: dict[str, Place]
    unflattened_shapes: dict[str, tuple[int, ...]]


def _place(extent: Extent) -> Place:
    return extent.file, extent.file_start, extent.length_bytes
