"""Which leaves are sharded? A sharded state dict taken apart for a save or a load, without changing it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from remesh.checkpoint.errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensorFactory,
    apply_factories,
)
from remesh.checkpoint.values.nests import (
    NESTS,
    Path,
    common_of,
    copy_nest,
    extract_matching_values,
    nested_leaves,
    nested_values,
)


def expand(sharded_state_dict: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """A copy with all factories built, and the nest of the factories without data that were in it."""
    if not isinstance(sharded_state_dict, dict):
        raise CheckpointMismatchError(
            f"taking a sharded state dict apart: expected a dict, found a {type(sharded_state_dict).__name__}"
        )
    for path, leaf in nested_leaves(sharded_state_dict):
        if isinstance(leaf, tuple) and _hides_entity(leaf):
            raise CheckpointMismatchError(
                f"taking a sharded state dict apart: the tuple at {'.'.join(map(str, path))} holds a sharded entity, "
                "expected entities in dicts and lists only, since a tuple is common data; use a list"
            )
    factories, _ = extract_matching_values(
        sharded_state_dict, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    expanded = copy_nest(sharded_state_dict)
    apply_factories(expanded)
    bare = copy_nest(factories)
    assert isinstance(bare, dict)
    return expanded, _without_data(bare)


def split(expanded: dict[Any, Any]) -> tuple[list[ShardedBase], list[LocalNonpersistentObject], dict[Any, Any]]:
    """Sharded entities, nonpersistent objects, and the nest of the common rest."""
    leaves = [leaf for _, leaf in nested_leaves(expanded)]
    common = common_of(
        expanded, lambda leaf: isinstance(leaf, ShardedBase | LocalNonpersistentObject), looks_within=False
    )
    entities = [leaf for leaf in leaves if isinstance(leaf, ShardedBase)]
    return entities, [leaf for leaf in leaves if isinstance(leaf, LocalNonpersistentObject)], common


def stored_factories(factories: Any, expanded: Any, stored: Collection[int], path: Path = ()) -> tuple[Any, list[Any]]:
    """The factories of which the checkpoint has all that they build, and what was built by those it has nothing of.

    ``stored`` holds the ids of the entities that are there. `CheckpointMismatchError` where it has a part only.
    """
    if isinstance(factories, ShardedTensorFactory):
        leaves = nested_values(expanded) if isinstance(expanded, NESTS) else (expanded,)
        built = [leaf for leaf in leaves if isinstance(leaf, ShardedBase)]
        absent = [entity.key for entity in built if id(entity) not in stored]
        if not absent:
            return factories, []
        if len(absent) < len(built):
            raise CheckpointMismatchError(
                f"merging what factory {factories.key!r} at {'.'.join(map(str, path))} builds: the checkpoint has "
                f"{len(built) - len(absent)} of {len(built)} entities, not {absent}, expected all of them or none; "
                "use a checkpoint that has all, or ask for the form that was saved"
            )
        return None, [expanded]
    kept, dropped = {}, []
    for name, inner in factories.items():
        whole, gone = stored_factories(inner, expanded[name], stored, (*path, name))
        dropped += gone
        if whole is not None:
            kept[name] = whole
    return kept, dropped


def _hides_entity(value: tuple[Any, ...]) -> bool:
    return any(
        isinstance(inner, ShardedBase | LocalNonpersistentObject) or (isinstance(inner, tuple) and _hides_entity(inner))
        for inner in value
    )


def _without_data(factories: Any) -> Any:
    if isinstance(factories, ShardedTensorFactory):
        return factories.without_data()
    return {name: _without_data(inner) for name, inner in factories.items()}
