"""Is there all that a plain state asks for? A key of a dict that is not stored is an error.

Who has misspelt it would go on without what was saved.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from remesh.checkpoint.errors import CheckpointMismatchError
from remesh.checkpoint.run.reader import OpenCheckpoint
from remesh.checkpoint.values.entities import LocalNonpersistentObject, ShardedBase
from remesh.checkpoint.values.nests import Path

_MOST_NAMED = 3


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


def _dotted(nest: Any, prefix: str = "") -> Iterator[str]:
    """The names of leaves, and of containers without any; a list is one name, whose elements are not looked at."""
    for key, value in nest.items() if isinstance(nest, dict) else ():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        elif not isinstance(value, ShardedBase | LocalNonpersistentObject):
            yield f"{prefix}{key}"
