"""A sharded state dict taken apart for a save or a load, without changing it, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from remesh.checkpoint.values.nests import (
    HOLE,
    NESTS,
    Path,
    common_of,
    copy_nest,
    dict_list_map_outplace,
    extract_matching_values,
    graft,
    nested_leaves,
    nested_values,
    without_holes,
)


@dataclass(frozen=True, slots=True)
class TakenApart:
    """The leaves of a sharded state dict by kind."""

    expanded: dict[Any, Any]
    """A copy of the nest with all factories built."""
    factories: dict[Any, Any]
    """The nest of the factories, without data."""
    entities: list[ShardedBase]
    nonpersistent: list[LocalNonpersistentObject]
    common: dict[Any, Any]
    """The nest of all else."""

    def sharded(self, keep: Callable[[ShardedBase], bool] = lambda entity: True) -> dict[Any, Any]:
        """The nest of entities alone, at their old places: a list is a dict by index there."""
        part, _ = extract_matching_values(
            self.expanded, lambda leaf: isinstance(leaf, ShardedBase) and keep(leaf), return_lists_as_dicts=True
        )
        assert isinstance(part, dict)
        return part

    def put_together(self, common: dict[Any, Any], values: Mapping[int, Any]) -> dict[Any, Any]:
        """Common data with the value of each entity, by its id, in its place, and factories merged.

        An entity without a value leaves no place, and neither does a factory that has no value of what it builds.
        Raises `CheckpointMismatchError` where a factory has a part of them, or cannot merge them.
        """
        factories, dropped = _stored_factories(self.factories, self.expanded, values.keys())
        filled = {id(one): HOLE for one in self.entities} | {**values} | {id(built): HOLE for built in dropped}
        filled |= {id(wrapper): wrapper.unwrap() for wrapper in self.nonpersistent}
        result = graft(self.expanded, common, filled)
        try:
            merged: dict[Any, Any] = apply_factory_merges(result, factories)
        except ValueError as raised:
            raise CheckpointMismatchError(f"merging what factories were built of: {raised}") from raised
        return merged if values.keys() >= {id(one) for one in self.entities} else without_holes(merged)


def take_apart(sharded_state_dict: dict[Any, Any], added: Mapping[str, Any] = MappingProxyType({})) -> TakenApart:
    """The leaves of the dict, and of what is added, by kind; `CheckpointMismatchError` for an entity in a tuple."""
    if not isinstance(sharded_state_dict, Mapping):
        raise CheckpointMismatchError(
            f"taking a sharded state dict apart: found a {type(sharded_state_dict).__name__}, expected a dict; give "
            "the dict that holds the state"
        )
    sharded_state_dict = {**sharded_state_dict, **added}
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
    bare = dict_list_map_outplace(lambda factory: factory.without_data(), factories)
    common = common_of(
        expanded, lambda leaf: isinstance(leaf, ShardedBase | LocalNonpersistentObject), looks_within=False
    )
    assert isinstance(bare, dict) and isinstance(common, dict)
    leaves = [leaf for _, leaf in nested_leaves(expanded)]
    entities = [leaf for leaf in leaves if isinstance(leaf, ShardedBase)]
    nonpersistent = [leaf for leaf in leaves if isinstance(leaf, LocalNonpersistentObject)]
    return TakenApart(expanded, bare, entities, nonpersistent, common)


def _stored_factories(factories: Any, expanded: Any, stored: Collection[int], path: Path = ()) -> tuple[Any, list[Any]]:
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
        whole, gone = _stored_factories(inner, expanded[name], stored, (*path, name))
        dropped += gone
        if whole is not None:
            kept[name] = whole
    return kept, dropped


def _hides_entity(value: tuple[Any, ...]) -> bool:
    return any(
        isinstance(inner, ShardedBase | LocalNonpersistentObject) or (isinstance(inner, tuple) and _hides_entity(inner))
        for inner in value
    )
