"""What does a plain state ask for besides tensors? Objects that keep a state dict, and keys that have to be there.

An object with ``state_dict`` and ``load_state_dict`` (torch's ``Stateful``: modules, optimizers, others) stands
for its state dict wherever it is in the state. A key of a dict that is asked for and not stored is an error: who has
misspelt it would go on without what was saved.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from remesh.checkpoint.errors import CheckpointMismatchError
from remesh.checkpoint.run.reader import OpenCheckpoint
from remesh.checkpoint.values.entities import LocalNonpersistentObject, ShardedBase
from remesh.checkpoint.values.nests import NESTS, Path, items_of
from remesh.layout.from_torch import Piece

_VALUES = (torch.Tensor, Piece, ShardedBase, LocalNonpersistentObject)
_MOST_NAMED = 3


def is_stateful(value: Any) -> bool:
    """Whether a value keeps a state dict of its own; `CheckpointMismatchError` for one that cannot take it back."""
    if isinstance(value, (*NESTS, *_VALUES, type)):
        return False
    can_give, can_take = (callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    if can_give and not can_take:
        raise CheckpointMismatchError(
            f"taking a state apart: a {type(value).__name__} has state_dict() and no load_state_dict(), expected both; "
            "give state_dict() itself"
        )
    return can_give


def spread_objects(state: Any) -> Any:
    """The state with the state dict of every such object in its place; the same state where there is none."""
    if not isinstance(state, dict) or not any(True for _ in paths_of_objects(state)):
        return state
    return _spread(state)


def paths_of_objects(nest: Any, path: Path = ()) -> Iterator[Path]:
    """Where such objects are."""
    for key, value in items_of(nest) if isinstance(nest, NESTS) else ():
        if isinstance(value, NESTS):
            yield from paths_of_objects(value, (*path, key))
        elif is_stateful(value):
            yield (*path, key)


def give_to_objects(state: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """Give every such object of the state what was loaded for it; the result with the objects in their places."""
    for path in list(paths_of_objects(state)):
        *way, last = path
        held, found = state, loaded
        for key in way:
            held, found = held[key], found[key]
        held[last].load_state_dict(found[last])
        found[last] = held[last]
    return loaded


def stored_names(checkpoint: OpenCheckpoint) -> set[str]:
    """The names of all that is stored, and of the dicts that it is in: paths joined by dots."""
    names: set[str] = set()
    for name in (*checkpoint.manifest.tensors, *checkpoint.manifest.objects, *_dotted(checkpoint.common)):
        while name and name not in names:
            names.add(name)
            name = name.rpartition(".")[0]
    return names


def check_asked(state: Any, stored: set[str]) -> None:
    """Raise `CheckpointMismatchError` for a key of a dict that is not stored, naming the nearest that is."""
    absent = [name for name in _dotted(state) if name not in stored]
    if absent:
        nearest = difflib.get_close_matches(absent[0], stored, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "; ask for what was saved"
        more = "" if len(absent) <= _MOST_NAMED else ", ..."
        raise CheckpointMismatchError(
            f"{len(absent)} keys that are asked for are not in the checkpoint, "
            f"{', '.join(map(repr, absent[:_MOST_NAMED]))}{more}{hint}"
        )


def check_objects_get_all(state: Any, objects: Iterable[Path], stored: Iterable[str]) -> None:
    """Raise `CheckpointMismatchError` if tensors are stored of an object that has no place for them yet."""
    for path in objects:
        prefix = ".".join(map(str, path)) + "."
        node = state
        for key in path:
            node = node[key]
        asked = {prefix + name for name in _dotted(node)}
        if rest := sorted(name for name in stored if name.startswith(prefix) and name not in asked):
            raise CheckpointMismatchError(
                f"object {prefix[:-1]!r}: its state_dict() has no place for {len(rest)} tensors that are stored, such "
                f"as {rest[0]!r}, expected one for each; let it make its state first (an optimizer takes a step), or "
                "give it by torch's get_state_dict"
            )


def _spread(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _spread(value) for key, value in nest.items()}
    if isinstance(nest, NESTS):
        return [_spread(value) for value in nest]
    return _spread(dict(_state_of(nest))) if is_stateful(nest) else nest


def _state_of(value: Any) -> Mapping[str, Any]:
    found = value.state_dict()
    if not isinstance(found, Mapping):
        raise CheckpointMismatchError(
            f"taking a state apart: state_dict() of a {type(value).__name__} is a {type(found).__name__}, expected a "
            "dict; make one of it"
        )
    return found


def _dotted(nest: Any, prefix: str = "") -> Iterator[str]:
    """The names of leaves, and of containers without any; a list is one name, whose elements are not looked at."""
    for key, value in nest.items() if isinstance(nest, dict) else ():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        elif not isinstance(value, ShardedBase | LocalNonpersistentObject):
            yield f"{prefix}{key}"
