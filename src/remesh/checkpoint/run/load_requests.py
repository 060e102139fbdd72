"""Requests of loads, compared with what is stored: names, kinds, dtypes and places of all that a plain state asks for.

A key of a dict that is not stored is an error: a program that misspells it would go on without what was saved. Where
some may be absent, the log names those that are, and the values that were there are kept.

Tensors are stored under names, the paths to them joined by dots; other values are stored under the keys themselves. So
``{1: 5}`` has no value for ``"1"``, and ``{"a.b": 5}`` none for ``{"a": {"b": None}}``. Native torch has names for all.
"""

from __future__ import annotations

import difflib
import logging
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.formats.fetch import read_objects
from remesh.checkpoint.formats.index_columns import ColumnTensors
from remesh.checkpoint.formats.torch_format import check_files
from remesh.checkpoint.run.reader import OpenCheckpoint
from remesh.checkpoint.values.entities import LocalNonpersistentObject, ShardedBase
from remesh.checkpoint.values.nests import (
    NESTS,
    Nest,
    Path,
    count_parents,
    items_of,
    name_of,
    named,
    nested_leaves,
    plain_names,
)
from remesh.foundation.torch_private import init_optimizer_state
from remesh.layout.from_torch import dtype_name
from remesh.resharding.model.tasks import travelling_dtype

logger = logging.getLogger(__name__)
_NOTHING = object()
_NEITHER = (ShardedBase, LocalNonpersistentObject)
"""Leaves of a state that are neither tensors nor plain values."""


def stored_names(checkpoint: OpenCheckpoint) -> set[str]:
    """The names of all that is stored, and of the dicts that it is in: paths joined by dots."""
    return {*checkpoint.names, *count_parents(_dotted(checkpoint.common))}


def check_names(state: Any, checkpoint: OpenCheckpoint) -> None:
    """Raise `CheckpointMismatchError` for two values that native torch would have under one name."""
    seen: set[str] = set()
    for name in plain_names(state) if checkpoint.is_native else ():
        if name in seen:
            raise CheckpointMismatchError(
                f"two values are asked for under the name {name!r}, and a checkpoint of native torch has one value of "
                "a name, expected one key for each; ask for it once"
            )
        seen.add(name)


def common_asked_for(state: Any, asked: Iterable[str], checkpoint: OpenCheckpoint) -> dict[Any, Any]:
    """The common data, without lists in which tensors are stored and that were saved without their places.

    Of such a list, which earlier releases have saved, the other values stand in order alone. They would come at other
    places unless it is asked for with all of its tensors: `CheckpointMismatchError`. Where it is not asked for, it is
    left out.
    """
    stored, wanted = checkpoint.above, count_parents(asked)

    def keep(node: dict[Any, Any], request: Any, prefix: str) -> dict[Any, Any]:
        kept: dict[Any, Any] = {}
        for key, value in node.items():
            name, inner = f"{prefix}{key}", request.get(key) if isinstance(request, dict) else None
            if isinstance(value, dict):
                kept[key] = keep(value, inner, f"{name}.")
            elif not isinstance(value, list) or name not in stored:
                kept[key] = value
            elif isinstance(inner, list):
                if wanted.get(name) != stored[name]:
                    raise CheckpointMismatchError(
                        f"list {name!r} is asked for with {wanted.get(name, 0)} of the {stored[name]} tensors that are "
                        "stored in it, expected all of them, since its other values were saved without their places; "
                        "ask for all of it, or leave it out"
                    )
                kept[key] = value
        return kept

    return keep(checkpoint.common, state, "")


def check_asked(state: Any, checkpoint: OpenCheckpoint) -> None:
    """Raise `CheckpointMismatchError` for a key of a dict that is not stored, naming the nearest that is."""
    if absent := [*_absent(state, checkpoint)]:
        raise CheckpointMismatchError(
            f"{len(absent)} keys that are asked for are not in the checkpoint, {named(map(name_of, absent), 3)}; "
            f"{_hint(absent[0], checkpoint)}"
        )


def check_casts(asked: Iterable[tuple[str, torch.dtype]], checkpoint: OpenCheckpoint) -> None:
    """Raise `CheckpointMismatchError` for a tensor whose values would change their kind, as floats to integers.

    Casts from floats to floats, and to integers with room for all stored ones, are made unasked, as in a reshard. Those
    of quantized values are refused anyway, where they are read.
    """
    stored = checkpoint.manifest.tensors
    whole = stored.whole if isinstance(stored, ColumnTensors) else {}  # most are, and need no closer look
    pairs = [(name, whole[name][0] if name in whole else stored[name].dtype, dtype_name(kind)) for name, kind in asked]
    differing = [one for one in pairs if one[1] != one[2] and not one[1].startswith("q")]
    clashing = [one for one in differing if travelling_dtype(one[1], one[2]) is None]
    for name, held, wanted in clashing:
        raise CheckpointMismatchError(
            f"{len(clashing)} tensors are asked for in a dtype that their values may not fit in: {name!r} is stored as "
            f"{held}, expected the same or a like dtype, found {wanted}; give tensors of the stored dtype, "
            "or pass allow_unsafe_types=True to have them cast like copy_"
        )


def check_kinds(state: Any, checkpoint: OpenCheckpoint) -> None:
    """Raise `CheckpointMismatchError` for a plain value that is asked for where tensors are stored, or parts alone.

    An empty dict is one, too: that of a fresh optimizer has no place for the moments of the one that was saved.
    """
    for name, parts in _without_kind(state, checkpoint):
        raise CheckpointMismatchError(
            f"{name!r} is asked for as one plain value, or as an empty dict or list, expected a place for each of the "
            f"{len(parts)} parts that are stored there, {named(parts, 3)}; give tensors of the stored shapes to be "
            "filled (let an optimizer create its state first), or leave the key out"
        )


def check_objects_get_all(asked: Container[str], objects: Sequence[Path], stored: Iterable[str]) -> None:
    """Raise `CheckpointMismatchError` if tensors are stored of an object that has no place for them yet.

    ``asked`` are the names of all tensors that are asked for.
    """
    for name, rest in _without_place(asked, objects, stored):
        raise CheckpointMismatchError(
            f"object {name!r}: its state_dict() has no place for {len(rest)} tensors that are stored, such "
            f"as {rest[0]!r}, expected a place for each; let the object create its state first (run one step of an "
            "optimizer; leave LBFGS out, whose state grows with its steps, and let it begin anew), or get its state "
            "with torch's get_state_dict"
        )


def report_differences(state: Any, asked: Container[str], objects: Sequence[Path], checkpoint: OpenCheckpoint) -> None:
    """Warn of what is asked for and not stored, and of what is stored of an object that has no place for it."""
    unkept = [name for name, _ in _without_kind(state, checkpoint)]
    if absent := [*map(name_of, _absent(state, checkpoint)), *unkept]:
        logger.warning(
            "loading checkpoint %s: %d keys are not in it and keep their values, %s",
            checkpoint.directory,
            len(absent),
            named(absent, 3),
        )
    for name, rest in _without_place(asked, objects, checkpoint.manifest.tensors):
        logger.warning(
            "loading checkpoint %s: object %r has no place for %d tensors, which are left out, %s",
            checkpoint.directory,
            name,
            len(rest),
            named(rest, 3),
        )


def _without_kind(state: Any, checkpoint: OpenCheckpoint) -> Iterator[tuple[str, list[str]]]:
    """Each name that is asked for as a plain value and would be left out, and what is stored there."""
    manifest, is_native = checkpoint.manifest, checkpoint.is_native
    above = checkpoint.names if is_native else checkpoint.above  # native torch has no container in one piece
    for name in plain_names(state):
        if name in above and not (is_native and name in manifest.objects):
            stored = sorted([*manifest.tensors, *(manifest.objects if is_native else ())])
            yield name, [name] * (name in manifest.tensors) + _below(name, stored)


def _below(name: str, ordered: Sequence[str]) -> list[str]:
    """Those of the names, given in order, that are in the dict or list of this name."""
    numbers = range(bisect_left(ordered, f"{name}."), len(ordered))
    return [*takewhile(lambda one: one.startswith(f"{name}."), map(ordered.__getitem__, numbers))]


def keep_absent(found: Any, asked: Any) -> Any:
    """The nest that was found; keys that it lacks keep the value of the request."""
    are_lists = isinstance(found, list) and isinstance(asked, list) and len(found) == len(asked)
    for key, value in items_of(asked) if are_lists or (isinstance(found, dict) and isinstance(asked, dict)) else ():
        if are_lists or key in found:
            keep_absent(found[key], value)
        else:
            found[key] = value
    return found


def _absent(state: dict[Any, Any], checkpoint: OpenCheckpoint) -> Iterator[Path]:
    """The paths to what is asked for and stored neither under their name nor under their keys."""
    above = checkpoint.names
    parts = above - checkpoint.manifest.objects.keys()

    def look(asked: Nest, stored: Any, path: Path, prefix: str) -> Iterator[Path]:
        for key, value in items_of(asked):
            name, found = f"{prefix}{key}", stored.get(key, _NOTHING) if isinstance(stored, dict) else _NOTHING
            # A list without tensors is stored in one piece; of others there may be what has a place.
            has_places = isinstance(value, list) and (isinstance(found, dict) or (found is _NOTHING and name in parts))
            if (isinstance(value, dict) or has_places) and value:
                yield from look(value, found, (*path, key), f"{name}.")
            elif found is _NOTHING and name not in above and not isinstance(value, _NEITHER):
                yield (*path, key)

    return look(state, checkpoint.common, (), "")


def _hint(absent: Path, checkpoint: OpenCheckpoint) -> str:
    """What may have been meant: the same name of other keys, or the nearest name."""
    name, stored = name_of(absent), stored_names(checkpoint)
    if name in stored:
        other = next((path for path in _paths(checkpoint.common) if name_of(path) == name), None)
        if other is not None:
            return f"keys {absent} are asked for and {other} are stored, a key of another type is another key"
    nearest = difflib.get_close_matches(name, stored, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else "ask for what was saved"


def _paths(nest: Any, path: Path = ()) -> Iterator[Path]:
    """The paths to all values of dicts in dicts, and to these dicts."""
    for key, value in nest.items() if isinstance(nest, dict) else ():
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _without_place(
    asked: Container[str], objects: Sequence[Path], stored: Iterable[str]
) -> Iterator[tuple[str, list[str]]]:
    """Each object that lacks a place for some tensors of its own that are stored, and those."""
    ordered = sorted(stored) if objects else []
    for name in map(name_of, objects):
        if rest := [one for one in _below(name, ordered) if one not in asked]:
            yield name, rest


def _dotted(nest: Any, prefix: str = "") -> Iterator[str]:
    """The names of leaves, and of containers without any; a list is one name, whose elements are not looked at."""
    for key, value in nest.items() if isinstance(nest, dict) else ():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        elif not isinstance(value, _NEITHER):
            yield f"{prefix}{key}"


def let_optimizers_begin(state: dict[str, Any], checkpoint: OpenCheckpoint) -> None:
    """Let torch's optimizers that have made no step yet create their state, with a step of none, to have it filled.

    One that has gradients is left alone, and so is LBFGS: what it keeps depends on the steps that it has made.
    """
    for path, leaf in nested_leaves(state) if isinstance(state, dict) else ():
        if not isinstance(leaf, torch.optim.Optimizer) or not f"{type(leaf).__module__}.".startswith("torch.optim."):
            continue
        if leaf.state or f"{name_of(path)}.state" not in checkpoint.above:
            continue
        if isinstance(leaf, torch.optim.SparseAdam):  # it takes no step with dense gradients
            for number, one in enumerate(one for group in leaf.param_groups for one in group["params"]):
                if f"{name_of(path)}.state.{number}" in checkpoint.above:  # others have had no gradient
                    moments = {name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")}
                    leaf.state[one] = {"step": 0, **moments}
        elif not isinstance(leaf, torch.optim.LBFGS):
            init_optimizer_state(leaf)


def native_common(node: Any, checkpoint: OpenCheckpoint, path: tuple[Any, ...]) -> Any:
    """What native torch stored for the common leaves of a request: under the dotted path of a leaf or container."""
    extent = checkpoint.manifest.objects.get(name_of(path))
    if path and extent is not None:
        check_files(checkpoint.directory, [extent])
        return read_objects(checkpoint.checksums, [extent])[0]
    if not isinstance(node, NESTS):
        return _NOTHING
    found = {key: native_common(value, checkpoint, (*path, key)) for key, value in items_of(node)}
    kept = {key: value for key, value in found.items() if value is not _NOTHING}
    if path and not kept:
        return _NOTHING
    return list(kept.values()) if isinstance(node, list) and len(kept) == len(node) else kept
