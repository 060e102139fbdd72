"""Save of a checkpoint: every rank writes its part, then one of them commits.

    gather 1   every rank: split the state dict, see that it can be stored, outline its entities; each checks all
    gather 2   rank 0: begin, which takes the lock of the directory, and the common data
    (strategy) gather 3: every rank its data file; gather 4: rank 0 the index
    gather 5   rank 0: finish, which is the commit

Gathers 1 and 3 are short when nothing has changed since a save that the `Agreements` remembers, and two each when
something has. Each gather also carries errors: when a step fails anywhere, all ranks raise the same error there, and
the checkpoint does not exist. Steps 1 to 2 are `begin_save`, 3 to 4 are `store_entities`, which a strategy may replace
or put off, 5 is `commit_save`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from remesh.checkpoint.background.staging import Copies as StagedCopies
from remesh.checkpoint.checkpoint_errors import as_checkpoint_error
from remesh.checkpoint.formats.data_file import dump_common, dump_object, write_data_file
from remesh.checkpoint.formats.directory import (
    COMMON_STATE_FNAME,
    METRICS_FNAME,
    CheckpointingConfig,
    begin,
    check_can_save,
    data_file_name,
    finish,
    stage_small,
)
from remesh.checkpoint.formats.index_files import IndexFiles, stage_index
from remesh.checkpoint.formats.torch_format import BACKEND, BACKEND_VERSION
from remesh.checkpoint.plan.flattened import shapes_before_flattening, stored_form, unflatten_all
from remesh.checkpoint.plan.writes import Written, assemble_index, select_objects, select_tensors
from remesh.checkpoint.run.collective_steps import take_step
from remesh.checkpoint.run.common_data import digest_of, warn_of_differences
from remesh.checkpoint.run.equal_copies import Copies, check_equal, digests_of
from remesh.checkpoint.storage import Location
from remesh.checkpoint.storage.save_lock import SaveLock, check_found, held
from remesh.checkpoint.values.entities import ShardedBase, ShardedTensor, check_has_values
from remesh.checkpoint.values.outline import Outline, check_outlines, outline_of
from remesh.comm.agreement import Agreement, Agreements, check_alike
from remesh.comm.gather import Group, group_rank, group_size
from remesh.foundation.collector import collector_at_rest
from remesh.layout.from_torch import dtype_name

S = TypeVar("S", bound="RankState")


@dataclass(frozen=True, slots=True)
class RankState:
    """The state that one rank saves: its entities with data, and the common data."""

    entities: Sequence[ShardedBase]
    common: dict[str, Any]
    """Equal on all ranks; that of rank 0 is written."""
    compared: dict[str, Any] | None = None
    """What of the common data is compared across ranks; None compares nothing."""
    blob: bytes | None = None
    """The common data, serialised already; None where it is not."""
    metrics: bytes = b""
    """The content of the file of metrics; empty where there is none. That of rank 0 is written."""
    copies: Copies = field(default_factory=dict)
    """What is seen to be equal on all ranks that hold it."""

    def dump(self) -> bytes:
        """The common data as it is to be written; `CheckpointMismatchError` for what could not be loaded again."""
        return dump_common(self.common) if self.blob is None else self.blob


@dataclass(frozen=True, slots=True)
class PartOfFile:
    """The entities that a rank writes into one file."""

    name: str
    objects: dict[str, bytes]
    numbers: list[int]
    """Of its tensors, among those of the part."""


@dataclass(frozen=True, slots=True)
class SavePart:
    """One rank's part of the sharded data, complete: writing it needs nothing else."""

    objects: dict[str, bytes]
    """Blobs by unique key, written first."""
    rows: list[tuple[Any, ...]]
    """``(key, dtype, shape of the box, global shape)`` of each tensor."""
    offsets: list[tuple[int, ...]]
    """Of the box of each tensor."""
    shapes_before_flattening: list[tuple[str, tuple[int, ...]]]
    tensors: list[torch.Tensor]
    """Boxes, on any device, of any strides."""
    separation_hint: str = ""
    """Tensors whose keys start with it have a file of their own, whose name starts with it too."""

    def files(self, rank: int, lock: int = 0) -> list[PartOfFile]:
        """What goes into each file of the rank; no file without anything to write."""
        hint, name = self.separation_hint, data_file_name(rank, lock)
        is_hinted = [bool(hint) and row[0].startswith(hint) for row in self.rows]
        others = PartOfFile(name, self.objects, [number for number, yes in enumerate(is_hinted) if not yes])
        hinted = PartOfFile(f"{hint}{name}", {}, [number for number, yes in enumerate(is_hinted) if yes])
        return [file for file in (others, hinted) if file.objects or file.numbers]

    def written(self, file: PartOfFile, places: Sequence[tuple[int, int]]) -> Written:
        """What the others need to know of a file, whose objects and then tensors lie at these places."""
        numbers = [number for place in places[: len(file.objects)] for number in place]
        for number, place in zip(file.numbers, places[len(file.objects) :], strict=True):
            numbers += self.offsets[number]
            numbers += place
        rows = [self.rows[number] for number in file.numbers]
        return Written(file.name, list(file.objects), rows, self.shapes_before_flattening, numbers)


@dataclass(frozen=True, slots=True)
class Begun(Generic[S]):
    """A save that may write: nothing stands against it on any rank."""

    state: S
    """What this rank brings."""
    common_blob: bytes
    """The common data as it is to be written; on the first rank alone."""
    lock: SaveLock
    """Where it may, for all that follows."""


@dataclass(frozen=True, slots=True)
class AfterCommon:
    """A function that a background save runs, with the common data written before; it can be sent to a process."""

    lock: SaveLock
    blob: bytes
    then: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with held(self.lock):
            stage_small(self.lock, self.blob)
        return None if self.then is None else self.then(*args, **kwargs)


def begin_save(  # noqa: PLR0913 - what is saved, where, and how far
    prepare: Callable[[], S],
    directory: Location,
    plans: Agreements,
    group: Group = None,
    *,
    validate: bool = True,
    may_create: bool = False,
    puts_off_common: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Begun[S]:
    """See that everything can be stored and fits together; then take the lock of the directory, write the common data.

    Called by every rank of the group. Until all ranks have found no fault, nothing on disk is touched. With
    ``puts_off_common`` the common data is left to be written by `AfterCommon`. ``options`` are those of the caller, as
    JSON, which must be alike on all ranks: on them hangs which collectives follow.
    """
    doing = f"saving checkpoint {directory}"
    is_first = group_rank(group) == 0

    def look() -> Begun[S]:
        if is_first:
            check_can_save(directory, may_create=may_create)
        state = prepare()
        return Begun(state, state.dump() if is_first else b"", SaveLock(directory))

    def tell(begun: Begun[S]) -> tuple[list[Any], list[Any]]:
        digest = digest_of(begun.state.compared) if group_size(group) > 1 else None
        outline = outline_in_pieces(begun.state.entities).parts() if validate else []
        copies = begun.state.copies
        return outline, [digest, {**options}, digests_of(copies) if copies else {}]

    with collector_at_rest():
        agreement = plans.agree(look, group, doing, tell=tell, translate=as_checkpoint_error, about="outline")
    begun = agreement.value
    check_alike([sent for _, sent, _ in agreement.beside], options.__getitem__, group, doing)
    if agreement.told is not None and any(agreement.told):
        check_outlines([Outline.from_parts(parts) if parts else Outline([], []) for parts in agreement.told])
        plans.remember(agreement)
    if any(sent for *_, sent in agreement.beside):
        check_equal([sent for *_, sent in agreement.beside], begun.state.copies, group, doing)
    if len({digest for digest, *_ in agreement.beside if digest is not None}) > 1:
        warn_of_differences(begun.state.compared, group)

    small = {COMMON_STATE_FNAME: b"" if puts_off_common else begun.common_blob, METRICS_FNAME: begun.state.metrics}
    lock = take_lock_together(directory, group, small)
    return replace(begun, lock=lock)


def take_lock_together(
    directory: Location, group: Group = None, small: Mapping[str, bytes] = MappingProxyType({})
) -> SaveLock:
    """The lock of a directory for all ranks, in which the first one writes these small files, but no empty ones.

    Called by every rank.
    """

    def take() -> int:
        if group_rank(group) != 0:
            return 0
        lock = begin(directory)
        with held(lock):
            for name in filter(small.get, small):
                stage_small(lock, small[name], name)
        return lock.number

    return SaveLock(directory, take_step(take, group, f"saving checkpoint {directory}", tell=int).told[0])


@dataclass(frozen=True, slots=True)
class SaveUnderWay:
    """A save that has begun, for the strategies that it calls."""

    lock: SaveLock
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    """Objects that have been serialised already, by unique key."""
    with_sha256: bool = False
    sums: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each data file by name, once it is written, if that is asked for."""
    is_lone: bool = False
    """Whether a strategy is used by itself, and has to close the lock."""


_UNDER_WAY: ContextVar[SaveUnderWay | None] = ContextVar("save_under_way", default=None)


@contextmanager
def writing_in(
    lock: SaveLock, *, blobs: Mapping[str, bytes] = MappingProxyType({}), with_sha256: bool = False
) -> Iterator[SaveUnderWay]:
    """Let strategies that are called in the block write under that lock, which its owner closes."""
    under_way = SaveUnderWay(lock, blobs, with_sha256)
    token = _UNDER_WAY.set(under_way)
    try:
        yield under_way
    finally:
        _UNDER_WAY.reset(token)


def save_under_way(directory: Location, group: Group) -> SaveUnderWay:
    """The save for a strategy to write in, or one of its own where it is used by itself. Called by every rank."""
    given = _UNDER_WAY.get()
    if given is not None and given.lock.directory == directory:
        return given
    return SaveUnderWay(take_lock_together(directory, group), is_lone=True)


def outline_in_pieces(entities: Sequence[ShardedBase]) -> Outline:
    """The outline of entities, flattened slices taken to pieces where there are any."""
    return outline_of(unflatten_all(entities) if any(map(_is_flattened, entities)) else entities)


def _is_flattened(entity: ShardedBase) -> bool:
    return isinstance(entity, ShardedTensor) and entity.flattened_range is not None


def _is_empty_slice(entity: ShardedBase) -> bool:
    return isinstance(entity, ShardedTensor) and entity.flattened_range is not None and not entity.data_shape[0]


def store_entities(  # noqa: PLR0913 - what is saved, where, and how
    entities: Iterable[ShardedBase],
    lock: SaveLock,
    plans: Agreements,
    group: Group = None,
    *,
    blobs: Mapping[str, bytes] | None = None,
    with_sha256: bool = False,
    separation_hint: str | None = None,
) -> dict[str, str]:
    """Write the sharded data and its index; without `commit_save` no reader takes it for a checkpoint.

    Called by every rank of the group. ``blobs`` are objects that have been serialised already, by unique key. Returns
    the SHA-256 of every data file, computed while it was written, if that is asked for.
    """

    def write() -> tuple[list[Any], dict[str, str]]:
        part = part_of(entities, blobs or {}, separation_hint)
        return write_part(part, part.tensors, lock, group_rank(group), with_sha256=with_sha256)

    return store_index(write, lock, plans, group)


def store_index(
    write: Callable[[], Sequence[Any]], lock: SaveLock, plans: Agreements, group: Group = None
) -> dict[str, str]:
    """Let every rank know what ``write`` returns, which is what `write_part` returned, and write the index of it.

    Returns the SHA-256 sums that all ranks have computed, by file.
    """
    agreement = agree_on_index(write, lock.directory, plans, group)
    with collector_at_rest():
        take_step(lambda: write_index_of(agreement, lock, group), group, f"saving checkpoint {lock.directory}")
    plans.remember(agreement)
    return sums_of(agreement)


def agree_on_index(
    write: Callable[[], Sequence[Any]], directory: Location, plans: Agreements, group: Group = None
) -> Agreement[Sequence[Any]]:
    """Let every rank know what ``write`` returns, which is what `write_part` returned. Called by every rank."""
    doing = f"saving checkpoint {directory}"
    return plans.agree(write, group, doing, translate=as_checkpoint_error, about="index")


def write_index_of(agreement: Agreement[Sequence[Any]], lock: SaveLock, group: Group = None) -> None:
    """Write the index of what was agreed on, on the first rank. Calls no other."""
    with held(lock):
        if group_rank(group) == 0:
            if agreement.told is not None:
                written = [one for parts in agreement.told for one in Written.from_parts(parts)]
                agreement.agreed.kept["index"] = IndexFiles.of(assemble_index(written))
            stage_index(lock, agreement.agreed.kept["index"])


def sums_of(agreement: Agreement[Sequence[Any]]) -> dict[str, str]:
    """The SHA-256 sums that all ranks sent beside what they have written, by file."""
    return {name: digest for sums in agreement.beside for name, digest in sums.items()}


def commit_save(lock: SaveLock, group: Group = None, config: CheckpointingConfig | None = None) -> None:
    """Make the checkpoint exist. Called by every rank of the group, when all else has reached the disk."""
    take_step(lambda: commit_alone(lock, group, config), group, f"saving checkpoint {lock.directory}")


def commit_alone(lock: SaveLock, group: Group = None, config: CheckpointingConfig | None = None) -> None:
    """`commit_save` on the first rank alone. No communication."""
    if group_rank(group) == 0:
        finish(lock, config or CheckpointingConfig(BACKEND, BACKEND_VERSION))


def commit_native(lock: SaveLock, group: Group = None) -> None:
    """`commit_alone` of sharded data by itself, without a marker, as in a checkpoint of native torch."""
    if group_rank(group) == 0:
        finish(lock, None)


def part_of(
    entities: Iterable[ShardedBase], blobs: Mapping[str, bytes], separation_hint: str | None = None
) -> SavePart:
    """Choose the entities that this rank writes: main replicas, and flattened slices in their stored form."""
    entities = list(entities)
    stored, flattened = entities, [one for one in entities if _is_flattened(one)]
    if flattened:
        stored = [stored_form(one) if _is_flattened(one) else one for one in entities if not _is_empty_slice(one)]  # type: ignore[arg-type]
    objects, tensors = select_objects(stored), select_tensors(stored)
    for one in tensors:
        if one.data is not None:
            check_has_values(one.data, one.key)
    dumped = dump_objects(one for group in objects.values() for one in group if one.unique_key not in blobs)
    return SavePart(
        {name: dumped[name] if name in dumped else blobs[name] for name in objects},
        [(one.key, dtype_name(one.dtype), one.box_shape, one.global_shape) for one in tensors],
        [one.global_offset for one in tensors],
        list(shapes_before_flattening(flattened).items()) if flattened else [],
        [one.data_in_box() for one in tensors],
        separation_hint or "",
    )


def write_part(
    part: SavePart,
    tensors: Sequence[torch.Tensor] | StagedCopies,
    lock: SaveLock,
    rank: int,
    *,
    progress: Callable[[int], None] | None = None,
    with_sha256: bool = False,
) -> tuple[list[Any], dict[str, str]]:
    """Write this rank's data files durably; returns what the others need to know of them. No communication.

    The second value has the SHA-256 of each file, by its name, if that is asked for. ``tensors`` are those of the part,
    or copies of them. ``progress`` is called with the number of bytes that are written.
    """
    boxes = tensors.tensors if isinstance(tensors, StagedCopies) else tensors
    written: list[Written] = []
    sums: dict[str, str] = {}
    done_bytes = 0
    for file in part.files(rank, lock.number):
        hasher = hashlib.sha256() if with_sha256 else None
        with held(lock):
            picked, tell = [boxes[number] for number in file.numbers], _beyond(done_bytes, progress)
            places = write_data_file(lock.directory / file.name, list(file.objects.values()), picked, tell, hasher)
        done_bytes += sum(length for _, length in places)
        written.append(part.written(file, places))
        if hasher is not None:
            sums[file.name] = hasher.hexdigest()
    if not written:
        check_found(lock)
    return [one for file in written for one in file.parts()], sums


def _beyond(done_bytes: int, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    return None if progress is None else lambda num_bytes: progress(done_bytes + num_bytes)


def dump_objects(entities: Iterable[ShardedBase]) -> dict[str, bytes]:
    """The blobs of the objects that their rank writes, by unique key; `CheckpointMismatchError` for one that cannot."""
    return {
        name: dump_object([element.data for element in group], f"object {name!r}")
        for name, group in select_objects(entities).items()
    }
