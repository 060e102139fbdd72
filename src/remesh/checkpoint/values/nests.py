"""Functions on nests of dicts and lists: flatten, map, filter, merge, compare. Pure.

A *nest* is a dict or list whose values are nests or leaves; everything else, tuples included, is a leaf. A leaf with
``state_dict`` and ``load_state_dict`` (torch's ``Stateful``: modules, optimizers, others) stands for its state dict.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.values.entities import LocalNonpersistentObject, ShardedBase
from remesh.layout.from_torch import Piece

Path = tuple[Any, ...]
"""Keys and indices from the root of a nest to a value in it."""

Nest = dict[Any, Any] | list[Any]
NESTS = (dict, list)
"""Types of nests; a union would be made anew each time that it is asked for."""

_STATELESS = (dict, list, torch.Tensor, Piece, ShardedBase, LocalNonpersistentObject, type)
"""Kinds of values that never keep a state dict of their own."""
_ENTITIES = (ShardedBase, LocalNonpersistentObject)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})
"""The types of nearly all leaves, which are found faster than their kind."""

_VERSIONS = "_metadata"
"""Attribute under which torch keeps the versions of modules at their state dict, for their own code at a load."""

LEFT_OUT = object()
"""What `graft` is given for an entity that was not loaded and shall not stand in the result."""
HOLE = object()
"""Stands where nothing was loaded until factories have merged what was built at places beside it."""


def items_of(nest: Nest) -> Iterable[tuple[Any, Any]]:
    """``(key or index, value)`` of one level of a nest."""
    return nest.items() if isinstance(nest, dict) else enumerate(nest)


def name_of(path: Path) -> str:
    """The name under which a value at that place is stored: the path, joined by dots."""
    return ".".join(map(str, path))


def named(names: Iterable[str], most: int = 5) -> str:
    """The first few names, quoted, for a message."""
    quoted = [*map(repr, names)]
    return ", ".join(quoted[:most] or ["none"]) + (", ..." if len(quoted) > most else "")


def nested_values(x: Nest) -> Iterator[Any]:
    """Every leaf, depth first in order.

    >>> list(nested_values({"a": [1, 2], "b": {"c": 3}}))
    [1, 2, 3]
    """
    for _, leaf in nested_leaves(x):
        yield leaf


def nested_leaves(x: Nest, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path, depth first in order."""
    for key, value in items_of(x):
        if isinstance(value, NESTS):
            yield from nested_leaves(value, (*path, key))
        else:
            yield (*path, key), value


def copy_nest(x: Any) -> Any:
    """The same nest with its own containers; leaves are shared. Subclasses of dict become plain dicts."""
    return dict_list_map_outplace(lambda leaf: leaf, x)


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """A new nest of the same form whose leaves are ``f`` of the old ones."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every leaf by ``f`` of it, in place; returns the nest."""
    if not isinstance(x, NESTS):
        return f(x)
    for key, value in list(items_of(x)):
        x[key] = dict_list_map_inplace(f, value)
    return x


def extract_matching_values(
    x: Nest, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Nest, Nest]:
    """Two nests: the leaves for which ``predicate`` holds, and the others.

    A container that loses all its leaves to the other side is left out; one that was empty stays with the others.
    With ``return_lists_as_dicts`` a list becomes ``{index: value}``, so that positions are not lost.

    >>> extract_matching_values({"a": 1, "b": [2, "x"], "c": {}}, lambda leaf: isinstance(leaf, int))
    ({'a': 1, 'b': [2]}, {'b': ['x'], 'c': {}})
    """
    match: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    for key, value in items_of(x):
        if isinstance(value, NESTS) and value:
            inner_match, inner_rest = extract_matching_values(value, predicate, return_lists_as_dicts)
            if inner_match:
                match[key] = inner_match
            if inner_rest:
                rest[key] = inner_rest
        elif isinstance(value, NESTS):
            rest[key] = value
        else:
            (match if predicate(value) else rest)[key] = value
    if isinstance(x, dict) or return_lists_as_dicts:
        return match, rest
    return list(match.values()), list(rest.values())


def common_of(nest: Any, is_out: Callable[[Any], bool], *, looks_within: bool) -> Any:
    """What is left of a nest without the leaves for which ``is_out`` holds; what had nothing else is left out.

    Of a list that loses elements, what is left stands under its place: ``{index: value}``. With ``looks_within`` also
    of one whose elements lose some of theirs; without, as programs for Megatron Core read them, those stay lists.

    >>> common_of({"a": [1.0, {"t": 2.0, "n": 3}], "b": [4]}, lambda leaf: type(leaf) is float, looks_within=False)
    {'a': {1: {'n': 3}}, 'b': [4]}
    """
    return _common_of(nest, is_out, looks_within)[0]


def _common_of(nest: Any, is_out: Callable[[Any], bool], looks_within: bool) -> tuple[Any, bool]:
    kept: dict[Any, Any] = {}
    is_whole = True
    for key, value in items_of(nest):
        if isinstance(value, NESTS):
            inner, is_inner_whole = _common_of(value, is_out, looks_within)
            is_whole &= is_inner_whole
            if inner or not value:
                kept[key] = inner
        elif is_out(value):
            is_whole = False
        else:
            kept[key] = value
    if isinstance(nest, list) and (is_whole if looks_within else len(kept) == len(nest)):
        return list(kept.values()), is_whole
    return kept, is_whole


def diff(
    x1: Any, x2: Any, prefix: Path = (), *, equal: Callable[[Any, Any], bool] | None = None
) -> tuple[list[Path], list[Path], list[tuple[Path, type, type]]]:
    """Compare two nests: the paths only in the left, the paths only in the right, and unequal leaves with their types.

    ``equal`` compares two leaves; by default those of one type, and dtype, and value.

    >>> diff({"a": 1, "b": 2}, {"b": 3, "c": 4})
    ([('a',)], [('c',)], [(('b',), <class 'int'>, <class 'int'>)])
    """
    if isinstance(x1, list) and isinstance(x2, list):
        x1, x2 = dict(enumerate(x1)), dict(enumerate(x2))
    if not (isinstance(x1, dict) and isinstance(x2, dict)):
        return [], [], [] if (equal or _are_equal)(x1, x2) else [(prefix, type(x1), type(x2))]
    only_left = [(*prefix, key) for key in x1 if key not in x2]
    only_right = [(*prefix, key) for key in x2 if key not in x1]
    mismatch: list[tuple[Path, type, type]] = []
    for key, value in x1.items():
        if key in x2:
            inner_left, inner_right, inner_mismatch = diff(value, x2[key], (*prefix, key), equal=equal)
            only_left += inner_left
            only_right += inner_right
            mismatch += inner_mismatch
    return only_left, only_right, mismatch


def _are_equal(left: Any, right: Any) -> bool:
    """Whether two leaves are of one type and have one value; what cannot be compared is taken for different."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_are_equal, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_are_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, Namespace | SimpleNamespace):
        return _are_equal(vars(left), vars(right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    try:
        if isinstance(left, np.ndarray):
            is_alike = left.dtype == right.dtype and left.shape == right.shape
            return is_alike and bool(np.array_equal(left, right) or left.tobytes() == right.tobytes())
        return bool(left == right)
    except Exception:  # ``==`` of any class may raise
        return False


def merge(x1: Any, x2: Any, key: Path = ()) -> Any:
    """``x1`` with everything of ``x2`` added, in place; a leaf may come from one side only."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"Cannot merge two lists with different lengths ({len(x1)} and {len(x2)}) at {key}")
        for index, value in enumerate(x2):
            x1[index] = merge(x1[index], value, (*key, index))
        return x1
    raise ValueError(
        f"Duplicate non-dict and non-list values encountered at {key}: {type(x1).__name__} and {type(x2).__name__}"
    )


def nested_items_iter(x: Nest) -> Iterator[tuple[Nest, Any, Any]]:
    """``(container, key or index, leaf)`` of every leaf, depth first in order."""
    for key, value in items_of(x):
        if isinstance(value, NESTS):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace every value of one dict by ``f`` of it, in place."""
    for key in d:
        d[key] = f(d[key])


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace every value of one dict by ``f`` of its key and it, in place."""
    for key in d:
        d[key] = f(key, d[key])


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """``reduce_fn`` of the list of ``value_fn`` of all elements with the same ``key_fn``, by key."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}


def graft(request: Nest, common: Any, filled: dict[int, Any], path: Path = ()) -> Nest:
    """The result of a load: ``common``, with the entities of ``request`` replaced by what was loaded for them.

    ``filled`` maps ``id(leaf)`` of each entity to its value. Other leaves of ``request`` count for nothing, except in
    lists: where a list is asked for, ``common`` may have ``{index: value}`` (see `common_of`), and elements without
    one stay those of ``request``. Earlier saves, and Megatron Core, have stored what was left in order: it goes to the
    places where ``request`` has no entity. Keys come in the order of ``request``.
    """
    if isinstance(request, list):
        return _graft_list(request, common, filled, path)
    if common is not None and not isinstance(common, dict):
        raise _cannot_graft(path, f"the state dict has a dict, the common data of the checkpoint {common!r}")
    result = dict(common or {})
    for key, value in request.items():
        grafted = _graft_value(value, result.get(key), filled, (*path, key))
        if grafted is not LEFT_OUT:
            if id(value) in filled and key in result:
                raise _cannot_graft((*path, key), "the state dict has a sharded entity, the checkpoint common data")
            result[key] = grafted
    return {key: result[key] for key in request if key in result} | result


def without_holes(nest: Any) -> Any:
    """The nest without the places that hold `HOLE`."""
    if isinstance(nest, dict):
        return {key: without_holes(value) for key, value in nest.items() if value is not HOLE}
    if isinstance(nest, list):
        return [without_holes(value) for value in nest if value is not HOLE]
    return nest


def _graft_value(value: Any, common: Any, filled: dict[int, Any], path: Path) -> Any:
    if id(value) in filled:
        return filled[id(value)]
    if isinstance(value, NESTS) and (isinstance(common, dict) or _holds_any(value, filled)):
        return graft(value, common, filled, path)
    return LEFT_OUT


def _graft_list(request: list[Any], common: Any, filled: dict[int, Any], path: Path) -> list[Any]:
    has_places = common is None or isinstance(common, dict)
    common_at = dict(common or {}) if has_places else _places_in_order(request, common, filled, path)
    if strange := [index for index in common_at if index not in range(len(request))]:
        raise _cannot_graft(
            path, f"the state dict has a list of {len(request)} elements, the checkpoint values at {strange!r}"
        )
    result = []
    for index, value in enumerate(request):
        if id(value) in filled and index in common_at:
            raise _cannot_graft((*path, index), "the state dict has a sharded entity, the checkpoint common data")
        grafted = _graft_value(value, common_at.get(index), filled, (*path, index))
        if grafted is not LEFT_OUT:
            result.append(grafted)
        elif index in common_at:
            result.append(common_at[index])
        elif has_places and not any(isinstance(leaf, _ENTITIES) for leaf in nested_values([value])):
            result.append(value)
    return result


def _places_in_order(request: list[Any], common: Any, filled: dict[int, Any], path: Path) -> dict[int, Any]:
    """Where in a list the elements belong that were stored without their places."""
    if not isinstance(common, list):
        raise _cannot_graft(path, f"the state dict has a list, the common data of the checkpoint {common!r}")
    if len(common) == len(request):
        return dict(enumerate(common))
    places = [index for index, value in enumerate(request) if _has_common(value, filled)]
    if len(places) != len(common):
        raise _cannot_graft(
            path,
            f"the checkpoint has {len(common)} list elements with common data, the state dict {len(places)} of "
            f"{len(request)}; ask for a list with as many elements as were saved",
        )
    return dict(zip(places, common, strict=True))


def _holds_any(nest: Nest, filled: dict[int, Any]) -> bool:
    return any(id(leaf) in filled for leaf in nested_values(nest))


def _has_common(value: Any, filled: dict[int, Any]) -> bool:
    if not isinstance(value, NESTS):
        return id(value) not in filled
    return not value or any(_has_common(inner, filled) for _, inner in items_of(value))


def _cannot_graft(path: Path, found: str) -> CheckpointMismatchError:
    where = ".".join(map(str, path)) or "the root"
    return CheckpointMismatchError(
        f"putting the loaded state dict together at {where}: expected the form that was saved, found that {found}"
    )


def is_stateful(value: Any) -> bool:
    """Whether a value keeps a state dict of its own; `CheckpointMismatchError` for one that cannot take it back."""
    if type(value) in _PLAIN or isinstance(value, _STATELESS):
        return False
    can_give, can_take = (callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    if can_give and not can_take:
        raise CheckpointMismatchError(
            f"taking a state apart: a {type(value).__name__} has state_dict() and no load_state_dict(), expected both; "
            "give state_dict() itself"
        )
    return can_give


def spread_objects(state: Any) -> tuple[Any, tuple[Path, ...]]:
    """The state with the state dict of every such object in its place, and where they are; itself if there is none."""
    try:
        leaves = nested_leaves(state) if isinstance(state, NESTS) else ()
        paths = tuple(path for path, leaf in leaves if is_stateful(leaf))
    except RecursionError:
        raise CheckpointMismatchError(
            "taking a state apart: a dict or list in it holds itself, or they are nested too deeply, expected a tree; "
            "leave the reference to the outer one out"
        ) from None
    return _spread(state) if paths else state, paths


def give_to_objects(state: dict[str, Any], loaded: dict[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """Give the objects at these paths what was loaded for them; the result with the objects in their places."""
    for path in paths:
        *way, last = path
        held, found = state, loaded
        for key in way:
            held, found = held[key], found[key]
        held[last].load_state_dict(found[last])
        found[last] = held[last]
    return loaded


def _spread(nest: Any) -> Any:
    if isinstance(nest, dict):
        return _versioned({key: _spread(value) for key, value in nest.items()}, nest)
    if isinstance(nest, list):
        return [_spread(value) for value in nest]
    if not is_stateful(nest):
        return nest
    state = _state_of(nest)
    return _spread(_versioned(dict(state), state))


def _state_of(value: Any) -> Mapping[str, Any]:
    found = value.state_dict()
    if not isinstance(found, Mapping):
        raise CheckpointMismatchError(
            f"taking a state apart: state_dict() of a {type(value).__name__} is a {type(found).__name__}, expected a "
            "dict; make one of it"
        )
    return found


def fill_nest(given: Any, loaded: Any) -> Any:
    """What was loaded, in the dicts and lists that were given, where there are some of the form: changed in place."""
    if isinstance(given, dict) and isinstance(loaded, dict):
        for key, value in loaded.items():
            given[key] = fill_nest(given.get(key), value)
        return given
    if isinstance(given, list) and isinstance(loaded, list):
        old = dict(enumerate(given))
        given[:] = [fill_nest(old.get(index), value) for index, value in enumerate(loaded)]
        return given
    return loaded


def with_versions(loaded: Any, asked: Any) -> Any:
    """What was loaded, in place, with the versions of modules beside the items of state dicts, as they were asked for.

    Modules with packed or renamed parameters read there in which form their state dict is, and take one without for
    that of an early release. What was asked for has the form of the program that asks.
    """
    inner: Iterable[Any] = ()
    if isinstance(loaded, dict) and isinstance(asked, dict):
        inner = [key for key, value in asked.items() if isinstance(value, NESTS) and key in loaded]
    elif isinstance(loaded, list) and isinstance(asked, list) and len(loaded) == len(asked):
        inner = range(len(loaded))
    for key in inner:
        loaded[key] = with_versions(loaded[key], asked[key])
    return _versioned(loaded, asked)


def _versioned(found: Any, like: Any) -> Any:
    # Not getattr: a dict of a program may answer to any name.
    versions = getattr(like, "__dict__", {}).get(_VERSIONS)
    if versions is None:
        return found
    versioned = OrderedDict(found)  # a plain dict has no attributes
    setattr(versioned, _VERSIONS, versions)
    return versioned


def count_parents(stored: Iterable[str]) -> dict[str, int]:
    """The names, and those of all dicts and lists that they are in: paths joined by dots; each with how many it has."""
    counts: dict[str, int] = {}
    for name in stored:
        counts[name] = counts.get(name, 0) + 1
        while name := name.rpartition(".")[0]:
            counts[name] = counts.get(name, 0) + 1
    return counts


def plain_names(nest: Any, prefix: str = "") -> Iterator[str]:
    """Where a nest asks for a value of its own: leaves that are no tensors, and containers of nothing."""
    for key, value in items_of(nest):
        if isinstance(value, NESTS) and value:
            yield from plain_names(value, f"{prefix}{key}.")
        elif not isinstance(value, torch.Tensor | Piece | ShardedBase | LocalNonpersistentObject):
            yield f"{prefix}{key}"


def check_own_names(state: Any, tensors: Iterable[str]) -> None:
    """Raise `CheckpointMismatchError` for a plain value of a state under the name of a tensor, or of what has some.

    A load of both would raise that one of them is of another kind.
    """
    _refuse_names(plain_names(state), tensors)


def check_no_tensors(common: Any, tensors: Iterable[str]) -> None:
    """The same for plain values of some ranks and tensors of others. A rank may well have nothing where others have
    tensors.
    """
    _refuse_names((name_of(path) for path, _ in nested_leaves(common)), tensors)


def _refuse_names(plain: Iterable[str], tensors: Iterable[str]) -> None:
    above = count_parents(tensors)
    for name in plain:
        if name in above:
            raise CheckpointMismatchError(
                f"taking a state apart: a plain value, or an empty dict or list, has the name {name!r}, under which "
                "there is a tensor as well, expected one name for each; rename one of the keys"
            )
