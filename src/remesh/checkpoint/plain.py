"""Checkpoints of plain state dicts: ``remesh.save(state, path)`` and ``remesh.load(state, path)``.

A *state* is a nest of dicts and lists. Its tensors may be DTensors of any placement (tensor parallel, FSDP2, both),
plain tensors, which every rank holds in full, or `Piece`; anything else is common data, the same on all ranks. A tensor
is stored under the path to it, joined by dots, so native torch finds it under the same name. An object inside the state
that has ``state_dict`` and ``load_state_dict``, such as a module, an optimizer or torch's ``Stateful``, stands for its
state dict, and is given what was loaded.

Saving describes every rank's boxes, lets the ranks that hold a box share the writing, and hands the boxes to the
writer as sharded tensors. Loading asks for this rank's boxes, whatever boxes were saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from remesh.checkpoint.background.saving_thread import BackgroundSave, thread_of
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError, as_checkpoint_error
from remesh.checkpoint.plan.writes import SMALL_BYTES, Choice, HeldBoxes, choose_writers
from remesh.checkpoint.run.collective_steps import take_step
from remesh.checkpoint.run.common_data import Common, join_common
from remesh.checkpoint.run.equal_copies import Copies, HeldCopy, check_equal, digests_of
from remesh.checkpoint.run.load_requests import (
    check_asked,
    check_casts,
    check_kinds,
    check_names,
    check_objects_get_all,
    common_asked_for,
    keep_absent,
    let_optimizers_begin,
    native_common,
    report_differences,
)
from remesh.checkpoint.run.read_apart import ReadApart
from remesh.checkpoint.run.reader import (
    Fill,
    OpenCheckpoint,
    check_is_one,
    open_checkpoint,
    plan_fill,
    run_fill,
)
from remesh.checkpoint.run.safetensors import open_safetensors_after
from remesh.checkpoint.run.writer import RankState, begin_save, commit_save, part_of, store_index, write_part
from remesh.checkpoint.storage import Directory, Location, location_of
from remesh.checkpoint.storage.save_lock import SaveLock
from remesh.checkpoint.values.entities import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    check_has_values,
)
from remesh.checkpoint.values.nests import (
    NESTS,
    Path,
    check_own_names,
    common_of,
    fill_nest,
    give_to_objects,
    graft,
    items_of,
    name_of,
    nested_leaves,
    spread_objects,
    with_versions,
)
from remesh.comm.agreement import Agreed, Agreement, Agreements, check_alike
from remesh.comm.gather import Group, group_rank, group_size
from remesh.foundation.collector import collector_at_rest
from remesh.foundation.errors import ConfigError
from remesh.foundation.options import check_option
from remesh.foundation.torch_private import never_compiled
from remesh.layout import Box, Shard, check_places, row_major_strides
from remesh.layout.from_torch import Piece, piece_of

_TENSORS = "tensors of a plain state"
"""Where `entities_of` has them; what is stored goes by their own names."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that every rank holds in full, with nothing behind them."""
_TENSORLIKE = (torch.Tensor, Piece)
_NOT_COMMON = (*_TENSORLIKE, ShardedBase, LocalNonpersistentObject)


@never_compiled
def save(
    state: Mapping[str, Any], path: Directory, *, group: Group = None, background: bool = False
) -> Future[Location]:
    """Write a state as one checkpoint into the directory or URL ``path``, which is created; commit it atomically.

    Called by every rank of the group with its own part; blocks until the checkpoint is on disk. Every distinct box is
    written once, common data by the first rank. Works in one process without a process group, too. Raises the same
    error on all ranks; then there is no new checkpoint, and an existing one is untouched.

    With ``background`` it blocks until the values are copied, or on a device until their copies are queued behind what
    is queued on the current stream, which then waits for them; a thread does the rest; at most two such saves hold
    copies at a time. Returns a future: ``result()`` waits until the checkpoint is complete and returns its location, or
    raises the error of the save, the same on all ranks. Without ``background`` the future is done.

    The process group may be destroyed meanwhile. The end of the program waits for all saves, however it comes to its
    end, and the exit code is not 0 where the last one failed and its future was never asked. ``os._exit``,
    ``os.exec*``, and a signal without a handler end the process at once. The future raises `ForkError` in a fork of
    the process, which has no part in the save.
    """
    return save_with_metrics(state, path, group, background)


@never_compiled
def entities_of(state: Mapping[str, Any], *, group: Group = None) -> ShardedStateDict:
    """The same state as sharded entities, for `dist_checkpointing.save` and its queue of background saves.

    Called by every rank of the group, like `save`; the checkpoint is the same, and `load` reads it. Ranks share the
    writing already, so do not wrap the strategy for that: the wrapper would find no values on ranks that write none.
    """
    agreement, common = _agree_on_writers(lambda: _tensors_of(state), _ENTITY_PLANS, group, "describing a state")
    copies = agreement.value.copies(agreement.agreed.kept["choice"], waits_for_devices=True)
    digests = take_step(lambda: digests_of(copies), group, "describing a state", tell=lambda found: found).told
    check_equal(digests, copies, group, "describing a state")
    _ENTITY_PLANS.remember(agreement)
    if _TENSORS in common.values:
        raise CheckpointMismatchError(
            f"describing a state: it has the key {_TENSORS!r}, which Remesh uses itself; rename that key"
        )
    entities = agreement.value.entities(agreement.agreed.kept["choice"].is_mine)
    return {**common.values, _TENSORS: entities} if entities else common.values


def _agree_on_writers(
    take_apart: Callable[[], _Tensors], plans: Agreements, group: Group, doing: str, *, background: bool = False
) -> tuple[Agreement[_Tensors], Common]:
    """The tensors of the state, and what all ranks agree on; under ``choice`` which boxes this rank writes.

    With them the common data, on the first rank that of all.
    """
    options = {"background": background}
    mine = Common({})

    def tell(tensors: _Tensors) -> tuple[list[Any], list[Any]]:
        nonlocal mine
        values = common_of(tensors.state, lambda leaf: isinstance(leaf, _NOT_COMMON), looks_within=True)
        mine = Common(values) if group_size(group) == 1 else Common.of(values)
        return tensors.boxes().parts(), [options, mine.digest]

    agreement = plans.agree(take_apart, group, doing, tell=tell, translate=as_checkpoint_error, about="writers")
    check_alike([sent for sent, _ in agreement.beside], options.__getitem__, group, doing)
    if agreement.told is not None:
        held = [HeldBoxes.from_parts(parts) for parts in agreement.told]
        agreement.agreed.kept["choice"] = choose_writers(held, group_rank(group))
        if group_rank(group) == 0:
            agreement.agreed.kept["names"] = {row[0] for one in held for row in one.form}
    digests = [digest for _, digest in agreement.beside]
    if len(set(digests)) > 1:
        mine = join_common(mine, digests, agreement.agreed.kept.get("names", ()), group, doing)
    return agreement, mine


@collector_at_rest()
def save_with_metrics(
    state: Mapping[str, Any], path: Directory, group: Group, background: bool, metrics: bytes = b""
) -> Future[Location]:
    """`save`, with the content of the file of metrics, if there are any."""
    rank, doing = group_rank(group), _doing("saving", path)

    def take_apart() -> _Tensors:
        location_of(path)
        if not isinstance(background, bool):
            check_option(doing, "background", background, bool)  # type: ignore[unreachable]  # not all check types
        return _tensors_of(state)

    agreement, common = _agree_on_writers(take_apart, _PLANS, group, doing, background=background)
    directory, tensors = location_of(path), agreement.value
    agreed, is_new = agreement.agreed, agreement.told is not None
    choice: Choice = agreed.kept["choice"]
    entities = tensors.entities(choice.is_mine) if is_new else []

    def copies() -> Copies:
        return tensors.copies(choice, waits_for_devices=is_new or not background)

    lock = begin_save(
        lambda: RankState(entities, common.values, None, common.blob, metrics, copies()),
        directory,
        _PLANS,
        group,
        validate=is_new,
        may_create=True,
    ).lock

    def data() -> list[torch.Tensor]:
        if is_new:
            agreed.kept["part"] = replace(part_of(entities, {}), tensors=[])
        return tensors.data(choice.is_mine)

    def write() -> tuple[list[Any], dict[str, str]]:
        mine = data()
        return write_part(agreed.kept["part"], mine, lock, rank)

    saved: Future[Location] = Future()
    if background:
        saved = _save_behind(data, agreed, lock, group)
    else:
        store_index(write, lock, _PLANS, group)
        commit_save(lock, group)
        saved.set_result(directory)
    _PLANS.remember(agreement)
    return saved


def _save_behind(
    data: Callable[[], list[torch.Tensor]], agreed: Agreed, lock: SaveLock, group: Group
) -> Future[Location]:
    """Copy this rank's values, and let a thread write them and commit."""
    thread, rank = thread_of(group), group_rank(group)
    thread.make_room()
    copies = take_step(lambda: thread.copies.copy(data()), group, f"saving checkpoint {lock.directory}").mine
    part = agreed.kept["part"]

    def finish() -> Location:
        try:
            store_index(lambda: write_part(part, copies.wait(), lock, rank), lock, thread.plans, thread.group)
        finally:
            thread.copies.give_back(copies)
        commit_save(lock, thread.group)
        return lock.directory

    saved = thread.submit(finish)
    _UNDER_WAY[lock.directory] = saved
    return saved


@never_compiled
def load(
    state: dict[str, Any],
    path: Directory,
    *,
    group: Group = None,
    strict: bool = True,
    allow_unsafe_types: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint at ``path``: fill ``state`` in place, its tensors and its common data; returns it.

    Called by every rank of the group; blocks until all have read, and before that until a save of this program that is
    under way there has ended. The number of ranks and the placement of every tensor may differ from those of the save;
    values are cast to the dtype of the tensor that they fill, floats to other floats and integers to wider ones, and
    with ``allow_unsafe_types`` whatever ``copy_`` casts. ``path`` may also hold a checkpoint of native torch, or be a
    folder of safetensors, as Hugging Face has them. Every tensor and every other key of ``state`` must be in the
    checkpoint; without ``strict``, those that are not keep their values, and a warning in the log names them. Shapes
    must match. Common data that is stored and not asked for is added; of a list that held tensors it is ``{index:
    value}``.
    Objects with ``load_state_dict`` get their state dicts last, and are in the result themselves. The versions of
    modules that torch keeps at a state dict, beside its items, are those of ``state``.

    Raises the same error on all ranks; no tensor is changed on any rank before all have planned their reads.
    """
    loaded = load_chosen(lambda _: state, path, group=group, strict=strict, allow_unsafe_types=allow_unsafe_types)
    filled: dict[str, Any] = fill_nest(state, loaded)
    return filled


@never_compiled
def load_chosen(
    choose: Callable[[OpenCheckpoint], dict[str, Any]],
    path: Directory,
    *,
    group: Group = None,
    strict: bool = True,
    allow_unsafe_types: bool = False,
    before_filling: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """As `load`, of a state that ``choose`` makes from the open checkpoint; for callers that want only what is stored.

    ``choose`` calls no other rank; what it raises all ranks raise. ``before_filling`` is called when all have planned
    their reads, and tensors begin to change.
    """
    doing = _doing("loading", path)

    def plan() -> _PlannedLoad:
        for name, given in (("strict", strict), ("allow_unsafe_types", allow_unsafe_types)):
            if not isinstance(given, bool):
                check_option(doing, name, given, bool)  # type: ignore[unreachable]  # not all check types
        if (save_into_it := _UNDER_WAY.get(location_of(path))) is not None:
            save_into_it.failure()  # what became of it, its handle reports
        try:
            checkpoint = open_checkpoint(location_of(path), allow_native=True)
        except CheckpointFormatError as raised:
            checkpoint = open_safetensors_after(raised, location_of(path))
        return _plan_load(choose(checkpoint), checkpoint, strict, allow_unsafe_types)

    with collector_at_rest():
        together = take_step(plan, group, doing, tell=lambda it: it.checkpoint.identity)
        check_is_one(together.told)
        before_filling()
        return take_step(together.mine.run, group, doing).mine


def _doing(verb: str, path: Directory) -> str:
    """The first words of an error. The step that looks at the place reports what is none, on all ranks alike."""
    try:
        return f"{verb} checkpoint {location_of(path)}"
    except ConfigError:
        return f"{verb} a checkpoint"


_PLANS = Agreements()
"""Of the states that this process has saved, so that ranks which save the same again send no plans."""
_ENTITY_PLANS = Agreements()
"""Of those that were made entities of."""
_UNDER_WAY: WeakValueDictionary[Location, BackgroundSave[Location]] = WeakValueDictionary()
"""Saves of this process in the background, by where they save: a load from there waits for them."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a state by name, by how this rank holds them. Their boxes come in this order."""

    state: dict[str, Any]
    """The state itself, without objects that keep one of their own."""
    whole: dict[str, torch.Tensor]
    """Plain ones, which every rank holds in full, as most are: they need no algebra, and are many."""
    cut: dict[str, _Held]
    """All others."""

    @property
    def names(self) -> set[str]:
        """Of all of them."""
        return {*self.whole, *self.cut}

    def dtypes(self) -> Iterator[tuple[str, torch.dtype]]:
        """The dtype of each, but of those of which this rank holds nothing."""
        yield from ((name, tensor.dtype) for name, tensor in self.whole.items())
        yield from ((name, held.piece.tensor.dtype) for name, held in self.cut.items() if held.boxes)

    def only(self, names: Container[str]) -> _Tensors:
        """The same state with the tensors of these names alone."""
        whole = {name: tensor for name, tensor in self.whole.items() if name in names}
        return _Tensors(self.state, whole, {name: held for name, held in self.cut.items() if name in names})

    def boxes(self) -> HeldBoxes:
        """All that other ranks need to know: ``(name, shape, bytes, dtype, global shape)`` and start of each box."""
        form: list[tuple[Any, ...]] = []
        starts: list[int] = []
        for name, tensor in self.whole.items():
            shape, num_bytes, text, start = _row_of(tensor.shape, tensor.dtype)
            form.append((name, shape, num_bytes, text, shape))
            starts += start
        for row, start in [row_at for held in self.cut.values() for row_at in held.rows()]:
            form.append(row)
            starts += start
        return HeldBoxes(form, starts)

    def entities(self, is_mine: Sequence[bool]) -> list[ShardedTensor]:
        """One sharded tensor per box; with data where this rank is the writer."""
        mine = iter(is_mine)
        made = [_whole_entity(name, tensor, is_mine=next(mine)) for name, tensor in self.whole.items()]
        for held in self.cut.values():
            made += held.sharded(list(islice(mine, len(held.boxes))))
        return made

    def data(self, is_mine: Sequence[bool]) -> list[torch.Tensor]:
        """The values of the boxes that this rank writes."""
        mine = iter(is_mine)
        values = [tensor for tensor in self.whole.values() if next(mine)]
        for held in self.cut.values():
            of_held = list(islice(mine, len(held.boxes)))
            values += [one.data_in_box() for one, yes in zip(held.sharded(of_held), of_held, strict=True) if yes]
        return values

    def copies(self, choice: Choice, *, waits_for_devices: bool) -> Copies:
        """The values of the boxes that other ranks hold, too. Whole tensors that are small may differ.

        Without those on devices where a look at them, which waits for what is queued there, is not wanted.
        """
        shared = {number for numbers in choice.shared.values() for number in numbers}
        found: dict[int, HeldCopy] = {}
        for number, (name, tensor) in enumerate(self.whole.items() if shared else ()):
            found[number] = HeldCopy(name, (0,) * tensor.ndim, tensor, tensor.nbytes <= SMALL_BYTES)
        number = len(self.whole)
        for held in self.cut.values() if shared else ():
            is_shared = [at in shared for at in range(number, number + len(held.boxes))]
            for at, one in enumerate(held.sharded(is_shared) if any(is_shared) else (), number):
                if one.data is not None:
                    found[at] = HeldCopy(held.name, one.global_offset, one.data_in_box(), False)
            number += len(held.boxes)
        if not waits_for_devices:
            found = {at: one for at, one in found.items() if one.values.device.type == "cpu"}
        return {ranks: [found[at] for at in numbers if at in found] for ranks, numbers in choice.shared.items()}


@dataclass(frozen=True)
class _Held:
    """A tensor of the state of which this rank may hold a part."""

    name: str
    leaf: torch.Tensor | Piece

    @cached_property
    def piece(self) -> Piece:
        return piece_of(self.leaf)

    @cached_property
    def boxes(self) -> Sequence[Shard]:
        """The shards that count: those with elements; of a tensor without any, one that stands for its name."""
        whole = Box.of_shape(self.piece.global_shape)
        if whole.is_empty:
            return [Shard(0, whole)]
        return [shard for shard in self.piece.shards if not shard.box.is_empty]

    def rows(self) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
        """The row of `_Tensors.boxes` of each box, and its start."""
        tensor, shape = self.piece.tensor, self.piece.global_shape
        itemsize, text = tensor.element_size(), str(tensor.dtype)
        boxes = [one.box for one in self.boxes]
        return [((self.name, box.shape, box.size * itemsize, text, shape), box.start) for box in boxes]

    def sharded(self, is_mine: Sequence[bool]) -> list[ShardedTensor]:
        """One sharded tensor per box; with data where this rank is the writer."""
        row_major = self.piece.tensor if self._is_direct else self.piece.tensor.contiguous()
        return [
            self._sharded(shard, row_major, 0) if mine else self._sharded(shard, None, 1)
            for shard, mine in zip(self.boxes, is_mine, strict=True)
        ]

    def wanted(self) -> tuple[list[ShardedTensor], torch.Tensor | None]:
        """One sharded tensor per box, its data sharing memory with the tensor, or with the copy that is returned.

        A copy is needed where boxes cannot be seen in a tensor that is not row-major; it must be copied back.
        """
        if self._is_direct or self.piece.tensor.is_contiguous():
            return [self._sharded(shard, self.piece.tensor, 0) for shard in self.boxes], None
        staged = self.piece.tensor.contiguous()
        return [self._sharded(shard, staged, 0) for shard in self.boxes], staged

    @cached_property
    def _is_direct(self) -> bool:
        """Whether the local tensor is the one box, so that its own strides serve."""
        shards = self.boxes
        shape = tuple(self.piece.tensor.shape)
        plain = (0, row_major_strides(shape), shape)
        return len(shards) == 1 and (shards[0].offset, shards[0].strides, shards[0].box.shape) == plain

    def _sharded(self, shard: Shard, row_major: torch.Tensor | None, replica_id: int) -> ShardedTensor:
        box, data = shard.box, row_major
        if row_major is not None and box.is_empty:
            data = row_major.new_empty(box.shape)
        elif row_major is not None and not self._is_direct:
            assert shard.strides is not None
            data = row_major.as_strided(box.shape, shard.strides, row_major.storage_offset() + shard.offset)
        dtype, shape = self.piece.tensor.dtype, self.piece.global_shape
        return ShardedTensor(self.name, data, dtype, box.shape, shape, box.start, None, replica_id)


@dataclass(frozen=True, slots=True)
class _PlannedLoad:
    """One rank's load after planning: no tensor has been changed yet."""

    checkpoint: OpenCheckpoint
    asked: dict[str, Any]
    """What is asked for."""
    state: dict[str, Any]
    """The same, with the state dicts of objects in their places."""
    objects: tuple[Path, ...]
    """Where those objects are."""
    common: dict[Any, Any]
    """What is stored beside tensors, of a checkpoint that Remesh wrote."""
    fill: Fill
    strict: bool

    def run(self) -> dict[str, Any]:
        state, checkpoint = self.state, self.checkpoint
        common = native_common(state, checkpoint, ()) if checkpoint.is_native else self.common
        run_fill(checkpoint, self.fill)
        filled = {id(leaf): leaf for _, leaf in nested_leaves(state) if isinstance(leaf, _TENSORLIKE)}
        increment_version([leaf for leaf in filled.values() if isinstance(leaf, DTensor)])  # beside their local ones'
        result = graft(state, common, filled)
        assert isinstance(result, dict)
        if not self.strict:
            result = keep_absent(result, state)
        return give_to_objects(self.asked, with_versions(result, state), self.objects)


def _plan_load(
    state: dict[str, Any], checkpoint: OpenCheckpoint, strict: bool, allow_unsafe_types: bool
) -> _PlannedLoad:
    let_optimizers_begin(state, checkpoint)
    spread, objects = spread_objects(state)
    taken = _take_apart(spread)
    check_names(taken.state, checkpoint)
    stored = checkpoint.manifest.tensors
    if not strict:
        report_differences(taken.state, taken.names, objects, checkpoint)
        taken = taken.only(stored)
    tensors: list[ShardedTensor] = []
    apart: list[ReadApart] = []
    for held in taken.cut.values():
        wanted, copy = held.wanted()
        tensors += wanted
        if copy is not None:
            apart.append(ReadApart(held.name, held.piece, copy))
    fill = plan_fill(checkpoint, tensors, list(taken.whole.items()), apart)
    if not allow_unsafe_types:
        check_casts(taken.dtypes(), checkpoint)
    if strict:
        check_asked(taken.state, checkpoint)
        check_objects_get_all(taken.names, objects, stored)
        check_kinds(taken.state, checkpoint)
    common = common_asked_for(taken.state, taken.names, checkpoint)
    return _PlannedLoad(checkpoint, state, taken.state, objects, common, fill, strict)


def _tensors_of(state: Mapping[str, Any]) -> _Tensors:
    tensors = _take_apart(spread_objects(state)[0])
    for name, tensor in tensors.whole.items():
        check_has_values(tensor, name)  # each time: a plan that is remembered goes by names, dtypes and shapes
    check_own_names(tensors.state, [*tensors.whole, *tensors.cut])
    return tensors


def _take_apart(state: Mapping[str, Any]) -> _Tensors:
    """Every tensor of the state under its name; `CheckpointMismatchError` for what cannot be stored."""
    if not isinstance(state, dict):
        raise CheckpointMismatchError(
            f"taking a state apart: found a {type(state).__name__}, expected a dict; give the object a name, as in "
            "{'model': model}"
        )
    whole: dict[str, torch.Tensor] = {}
    cut: dict[str, _Held] = {}
    for name, leaf in _named_leaves(state):
        if isinstance(leaf, Piece):
            check_places(leaf.shards, leaf.global_shape, f"taking a state apart, tensor {name!r}", leaf.tensor.numel())
        if isinstance(leaf, ShardedBase):
            raise CheckpointMismatchError(
                f"taking a state apart: {name!r} is a {type(leaf).__name__}, expected a tensor, a Piece or a value; "
                "dist_checkpointing.save and load take sharded state dicts"
            )
        is_whole = type(leaf) in _PLAIN
        if not is_whole and not isinstance(leaf, _TENSORLIKE):
            continue
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or is_lazy(leaf)):
            check_has_values(leaf, name)  # they have no shape to be described by
        if name in whole or name in cut:
            places = [
                path for path, leaf in nested_leaves(state) if isinstance(leaf, _TENSORLIKE) and name_of(path) == name
            ]
            raise CheckpointMismatchError(
                f"taking a state apart: the tensors at {places[0]} and {places[1]} would both be stored as {name!r}, "
                "expected one tensor per name; rename one of the keys"
            )
        if is_whole:
            whole[name] = leaf
            continue
        cut[name] = held = _Held(name, leaf)
        if held.boxes:
            check_has_values(held.piece.tensor, name)
        if held.piece.partial is not None:
            raise CheckpointMismatchError(
                f"taking a state apart: tensor {name!r} is a partial {held.piece.partial} over its mesh, expected "
                "final values; redistribute it to Replicate or Shard first"
            )
    return _Tensors(state, whole, cut)


def _named_leaves(nest: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nest under its path, joined by dots."""
    for key, value in items_of(nest):
        if isinstance(key, float) and math.isnan(key):
            raise CheckpointMismatchError(
                f"taking a state apart: there is a key {prefix}{key}, and NaN equals no other key, so no load asks "
                "for it; rename it"
            )
        if isinstance(value, NESTS):
            yield from _named_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _whole_entity(name: str, tensor: torch.Tensor, *, is_mine: bool) -> ShardedTensor:
    shape = tuple(tensor.shape)
    data, replica_id = (tensor, 0) if is_mine else (None, 1)
    return ShardedTensor(name, data, tensor.dtype, shape, shape, (0,) * len(shape), None, replica_id)


@lru_cache(maxsize=4096)
def _row_of(shape: torch.Size, dtype: torch.dtype) -> tuple[tuple[int, ...], int, str, tuple[int, ...]]:
    """Shape, bytes, dtype and start of a tensor that is held whole; most states have few kinds of them."""
    return tuple(shape), math.prod(shape) * dtype.itemsize, str(dtype), (0,) * len(shape)
