"""JSON encoding of an image's records, by the annotations of their dataclasses, with strict reading.

``bytes`` are written in hex, tuples as lists, enums by value. Reading is strict: a field that is missing, unknown or
of another type is a `FormatError` that names it. Nothing is ever unpickled or executed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any, Final, TypeVar

from remesh.foundation.errors import FormatError

T = TypeVar("T")
_PLAIN: Final = {int, str, bool, type(None)}


def to_json(value: Any) -> Any:
    """The JSON form of a record, or of a value in one.

    >>> @dataclasses.dataclass
    ... class Point:
    ...     name: str
    ...     mark: bytes
    >>> to_json(Point("a", b"xy"))
    {'name': 'a', 'mark': '7879'}
    """
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _field_names(type(value))
        return {name: field if type(field := getattr(value, name)) in _PLAIN else to_json(field) for name in names}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple) and set(map(type, value)) == {int}:
        return value  # json writes tuples as lists; there may be a million numbers
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def from_json(kind: type[T], value: Any, where: str) -> T:
    """The record of type ``kind`` that ``value`` is the JSON form of; ``where`` names its file in errors."""
    result: T = _read(kind, value, where)
    return result


def damaged(code: str, path: object, why: str) -> FormatError:
    """The error for a file of an image that is not as it was written."""
    return FormatError(code, f"reading {path}: {why}; restart from another image")


def _wrong(where: str, expected: str, found: object) -> FormatError:
    shown = repr(found)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return FormatError("bad-record", f"reading {where}: expected {expected}, found {shown}; take another image")


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        return _read_tuple(arguments, value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        return {_read_key(arguments[0], key): _read(arguments[1], v, f"{where}.{key}") for key, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if value not in {member.value for member in kind}:
            raise _wrong(where, f"one of {sorted(member.value for member in kind)}", value)
        return kind(value)
    if kind is bytes:
        try:
            return bytes.fromhex(value)
        except (TypeError, ValueError):
            raise _wrong(where, "bytes in hex", value) from None
    if type(value) is not kind:
        raise _wrong(where, kind.__name__, value)
    return value


def _read_key(kind: Any, key: str) -> Any:
    return int(key) if kind is int and key.isdecimal() else key


def _read_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    if arguments == (int, Ellipsis):
        if not set(map(type, value)) <= {int}:
            raise _wrong(where, "a list of integers", value)
        return tuple(value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise _wrong(where, f"a list of {len(arguments)}", value)
    return tuple(_read(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(arguments, value, strict=True)))


@functools.cache
def _annotations(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    annotations = _annotations(kind)
    if set(value) != set(annotations):
        raise _wrong(where, f"the fields {sorted(annotations)}", sorted(value))
    try:
        return kind(**{name: _read(annotations[name], value[name], f"{where}.{name}") for name in annotations})
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError("bad-record", f"reading {where}: {error}; take another image") from error
