"""Codec of plain values: JSON text from which equal values of the same types come back.

JSON has no tuples, counters, sets, bytes or keys that are numbers. What it lacks is written as an object with one key,
``"!"`` and the name of the type. A value of a type that is not in the table is refused by its place: a subclass would
come back as its base class, and a program would go on with another object than it had.

Texts are compared between ranks: one value has one text. So sets are sorted by the texts of what is in them.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from remesh.checkpoint.formats.blob_frame import memory_of
from remesh.foundation.errors import ConfigError

MAX_TENSOR_BYTES = 1 << 20
"""Of a tensor among plain values: every rank sends its values to all others when a mesh is filled."""
_PLAIN = (bool, int, float, str, type(None))
_FACTORIES: dict[str, Any] = {each.__name__: each for each in (bool, dict, float, int, list, set, str, tuple)}
_MOST_SHOWN = 60
"""Characters of a value in an error."""


def encode(name: str, value: Any) -> str:
    """The text of a value; ``name`` is its place in messages. ConfigError for what would not come back as it is.

    >>> encode("x", {1: (2, 3)})
    '{"!dict":[[1,{"!tuple":[2,3]}]]}'
    """
    try:
        return json.dumps(_to_json(value, name), separators=(",", ":"))
    except RecursionError as error:
        raise ConfigError(
            f"carrying {name!r}: its plain values refer to themselves, or lie too deep; let state_dict give flat ones"
        ) from error


def decode(text: Any) -> Any:
    """The value of a text.

    >>> decode(encode("x", {1: (2, 3)}))
    {1: (2, 3)}
    """
    return _from_json(json.loads(text))


def find_difference(one: str, other: str) -> str:
    """The place at which two texts differ, and what stands there, in words.

    >>> find_difference('{"a":[1,2]}', '{"a":[1,3]}')
    "['a'][1] is 2 and 3"
    """
    path, a, b = "", json.loads(one), json.loads(other)
    while True:
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            parts = [(key, a[key], b[key]) for key in a]
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            parts = [(at, *pair) for at, pair in enumerate(zip(a, b, strict=True))]
        else:
            parts = []
        unlike = next((part for part in parts if json.dumps(part[1]) != json.dumps(part[2])), None)
        if unlike is None:
            return f"{path or 'it'} is {str(a)[:_MOST_SHOWN]} and {str(b)[:_MOST_SHOWN]}"
        path, a, b = f"{path}[{unlike[0]!r}]", *unlike[1:]


@dataclass(frozen=True, slots=True)
class _TypeRow:
    """How values of one type are written."""

    kind: type
    take_apart: Callable[[Any], Any]
    """What a value consists of: values of other types, or of JSON."""
    make: Callable[[Any], Any]
    """The value again, from parts that are made again already."""


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    return [[key, one] for key, one in value.items()]


def _text(raw: Any) -> str:
    return base64.b64encode(raw).decode()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor_parts(tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.nbytes > MAX_TENSOR_BYTES:
        raise ValueError(f"a {tensor.layout} tensor of {tensor.numel()} elements, carry it by itself")
    raw = memory_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
    return [_dtype_name(tensor.dtype), list(tensor.shape), _text(raw)]


def _make_tensor(parts: Sequence[Any]) -> torch.Tensor:
    dtype, shape, raw = parts
    content = bytearray(base64.b64decode(raw))
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.view(getattr(torch, dtype)).reshape(shape)


def _array_parts(array: Any) -> list[Any]:
    if array.dtype.hasobject or array.dtype.names or array.nbytes > MAX_TENSOR_BYTES:
        raise ValueError(f"a NumPy array of {array.dtype} with {array.size} elements")
    return [array.dtype.str, list(array.shape), _text(np.ascontiguousarray(array).tobytes())]


def _make_array(parts: Sequence[Any]) -> Any:
    dtype, shape, raw = parts
    return np.frombuffer(bytearray(base64.b64decode(raw)), dtype=dtype).reshape(shape)


def _default_parts(value: defaultdict[Any, Any]) -> list[Any]:
    name = None if value.default_factory is None else getattr(value.default_factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not value.default_factory:
        raise ValueError(f"a defaultdict of {value.default_factory}")
    return [name, _pairs(value)]


def _make_default(parts: Sequence[Any]) -> defaultdict[Any, Any]:
    name, pairs = parts
    return defaultdict(None if name is None else _FACTORIES[name], pairs)


_ROWS: dict[str, _TypeRow] = {
    "dict": _TypeRow(dict, _pairs, dict),
    "OrderedDict": _TypeRow(OrderedDict, _pairs, OrderedDict),
    "Counter": _TypeRow(Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    "defaultdict": _TypeRow(defaultdict, _default_parts, _make_default),
    "deque": _TypeRow(deque, lambda value: [value.maxlen, list(value)], lambda told: deque(told[1], told[0])),
    "tuple": _TypeRow(tuple, list, tuple),
    "Size": _TypeRow(torch.Size, list, torch.Size),
    "set": _TypeRow(set, list, set),
    "frozenset": _TypeRow(frozenset, list, frozenset),
    "bytes": _TypeRow(bytes, _text, base64.b64decode),
    "bytearray": _TypeRow(bytearray, _text, lambda text: bytearray(base64.b64decode(text))),
    "complex": _TypeRow(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "dtype": _TypeRow(torch.dtype, _dtype_name, lambda name: getattr(torch, name)),
    "device": _TypeRow(torch.device, str, torch.device),
    "Tensor": _TypeRow(torch.Tensor, _tensor_parts, _make_tensor),
    "ndarray": _TypeRow(np.ndarray, _array_parts, _make_array),
    "number": _TypeRow(np.generic, _array_parts, lambda parts: _make_array(parts)[()]),
}
_NAMES = {row.kind: name for name, row in _ROWS.items()}


def merge_values(by_rank: Sequence[Mapping[str, str]], apart: Collection[str] = ()) -> dict[str, str]:
    """The values of all ranks, in rank order; a rank need not have all of them, as in a pipeline.

    ConfigError where two ranks have different values of one name, but for those ``apart``, whose first is taken.
    """
    merged: dict[str, tuple[int, str]] = {}
    for rank, values in enumerate(by_rank):
        for name, text in values.items():
            first, known = merged.setdefault(name, (rank, text))
            if text != known and name not in apart:
                found = find_difference(known, text)
                raise ConfigError(
                    f"carrying {name!r}: its plain values differ between ranks: {found} on ranks {first} and {rank}, "
                    "and a rank that is lost would get another one's; make them equal (all-reduce what each rank "
                    "measures for itself), or leave them out of what is carried"
                )
    return {name: text for name, (_, text) in merged.items()}


def _to_json(value: Any, place: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_to_json(one, f"{place}[{at}]") for at, one in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("!") for key in value):
        return {key: _to_json(one, f"{place}[{key!r}]") for key, one in value.items()}
    name = _NAMES.get(np.generic if isinstance(value, np.generic) else kind)
    try:
        if name is None:
            raise ValueError(f"{kind.__module__}.{kind.__qualname__}")
        apart = _ROWS[name].take_apart(value)
    except ValueError as error:
        raise ConfigError(
            f"carrying {place}: found {error}, expected plain values that come back as they are (numbers, strings, "
            "lists, tuples, sets, dicts, counters, bytes, small tensors and arrays); carry large tensors by "
            "themselves, and let state_dict leave other objects out"
        ) from error
    parts = _to_json(apart, place)
    return {f"!{name}": sorted(parts, key=json.dumps) if kind in (set, frozenset) else parts}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag.startswith("!"):
        return _ROWS[tag[1:]].make(_from_json(value[tag]))
    return {key: _from_json(one) for key, one in value.items()}
