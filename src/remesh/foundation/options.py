"""Validation of keyword options: unknown names and wrong types are refused, with the nearest known name.

Calls that hand options on take them as keywords, declared by a TypedDict. Python looks neither at such names nor at
the types of any argument; `check_options` looks at both, and `check_option` at the type of a single argument. Types
are those of annotations: classes, enums, unions, literals, and the elements of mappings and sequences. A bool is no
number here, and an int does for a float.
"""

from __future__ import annotations

import collections.abc
import difflib
import math
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union

from remesh.foundation.errors import ConfigError

_MOST_SHOWN = 80
"""Characters of a wrong value in an error."""


class OptionError(ConfigError, TypeError):
    """An option has an unknown name or a value of the wrong type; the caller must mend the call."""


def check_options(doing: str, given: Mapping[str, Any], known: type) -> None:
    """Raise `OptionError` unless every option is one of ``known``, a TypedDict, and has its type.

    ``doing`` is the first part of the message, such as ``"resharding"``.
    """
    hints = _hints_of(known)
    for name, value in given.items():
        if name not in hints:
            raise OptionError(
                f"{doing}: there is no option {name!r}{_nearest(name, list(hints))}, expected "
                f"{', '.join(hints)}; correct its name, or leave it out"
            )
        check_option(doing, name, value, hints[name])


def check_option(doing: str, name: str, value: Any, expected: Any) -> None:
    """Raise `OptionError` unless the value has the expected type, given as an annotation gives it."""
    if not _has_type(value, expected):
        name, value, expected = _wrong_part(f"option {name!r}", value, expected)
        shown = repr(value)
        raise OptionError(
            f"{doing}: {name} is {shown[:_MOST_SHOWN]}{'...' if len(shown) > _MOST_SHOWN else ''}, of type "
            f"{type(value).__name__}, expected {_words(expected)}; give one, or leave the option out"
        )


def check_range(doing: str, name: str, value: float, *, least: float, most: float = math.inf) -> None:
    """Raise `OptionError` unless the number lies between two others, which it may be; what is not a number does not."""
    if not least <= value <= most:
        limit = "" if most == math.inf else f" and at most {most}"
        raise OptionError(
            f"{doing}: option {name!r} is {value}, of type {type(value).__name__}, expected at least {least}{limit}; "
            "give such a number, or leave the option out"
        )


def find_unlike(by_place: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """The first option that not all have alike, and the place of one that has not what the first has; None if all are.

    ``by_place`` has the options of each by name; a rank that omits an option is treated as passing None.

    >>> find_unlike([{"seed": 0}, {"seed": 0}, {"seed": 7}])
    ('seed', 2)
    """
    for name in dict.fromkeys(name for options in by_place for name in options):
        for place, options in enumerate(by_place):
            if options.get(name) != by_place[0].get(name):
                return name, place
    return None


@cache
def _hints_of(known: type) -> Mapping[str, Any]:
    return typing.get_type_hints(known)


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _has_type(value: Any, expected: Any) -> bool:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_has_type(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is None:
        return _is_instance(value, types.NoneType if expected is None else expected)
    is_text = isinstance(value, str | bytes)
    if not isinstance(value, origin) or is_text:
        return False
    if origin is tuple and Ellipsis not in arguments:
        return len(value) == len(arguments) and all(map(_has_type, value, arguments))
    return _elements_have_types(value, arguments)


def _is_instance(value: Any, expected: type) -> bool:
    if expected in (int, float):
        number = numbers.Integral if expected is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, expected)


def _elements_have_types(value: Any, expected: tuple[Any, ...]) -> bool:
    if isinstance(value, collections.abc.Mapping):
        return all(_has_type(key, expected[0]) and _has_type(each, expected[1]) for key, each in value.items())
    if isinstance(value, collections.abc.Sequence):
        return all(_has_type(each, expected[0]) for each in value)
    return True


def _wrong_part(name: str, value: Any, expected: Any) -> tuple[str, Any, Any]:
    """The first value of a mapping that is wrong, where all else of it is right: how to call it, it, and its type."""
    for each in typing.get_args(expected) if typing.get_origin(expected) in (Union, types.UnionType) else (expected,):
        kinds = typing.get_args(each)
        if typing.get_origin(each) is not collections.abc.Mapping or not isinstance(value, collections.abc.Mapping):
            continue
        for key, one in value.items():
            if _has_type(key, kinds[0]) and not _has_type(one, kinds[1]):
                return f"{name}[{key!r}]", one, kinds[1]
    return name, value, expected


def _words(expected: Any) -> str:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if expected is types.NoneType or expected is None:
        return "None"
    if origin is None and isinstance(expected, type):
        return expected.__name__
    return str(expected).replace("collections.abc.", "").replace("typing.", "")
