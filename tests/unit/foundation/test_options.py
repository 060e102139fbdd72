"""Options that nobody knows, and values of the wrong type, are refused at once, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypedDict

import numpy as np
import pytest

import remesh
from remesh.foundation.errors import ConfigError
from remesh.foundation.options import OptionError, check_option, check_options


class Colour(Enum):
    RED = "red"


class Settings(TypedDict, total=False):
    num_rounds: int
    timeout_s: float
    colour: Colour
    rates: Mapping[int, str] | None
    way: Literal["near", "far"]
    sizes: Sequence[int]
    at: tuple[int, str]
    call: Callable[[], int]


RIGHT = [
    {},
    {"num_rounds": 3, "timeout_s": 2},
    {"num_rounds": np.int64(3), "timeout_s": np.float32(2)},
    {"colour": Colour.RED, "rates": {0: "a"}, "way": "far"},
    {"rates": None, "sizes": [1, 2], "at": (1, "a"), "call": int},
    {"sizes": (1, 2)},
    {"sizes": ()},
]
WRONG = [
    ("num_rounds", "3", "expected int"),
    ("num_rounds", True, "expected int"),
    ("num_rounds", 3.0, "expected int"),
    ("timeout_s", "2", "expected float"),
    ("colour", "red", "expected Colour"),
    ("rates", {"0": "a"}, "expected Mapping[int, str] or None"),
    ("rates", [], "expected Mapping"),
    ("way", "nearby", "'near', 'far'"),
    ("sizes", "12", "expected Sequence[int]"),
    ("sizes", [1, "2"], "expected Sequence[int]"),
    ("sizes", (1, "2"), "expected Sequence[int]"),
    ("at", (1, "a", 2), "expected tuple"),
    ("call", 1, "expected Callable"),
]


@pytest.mark.parametrize("options", RIGHT)
def test_right_options_pass(options: dict[str, Any]) -> None:
    check_options("testing", options, Settings)


@pytest.mark.parametrize(("name", "value", "told"), WRONG)
def test_a_value_of_the_wrong_type_is_refused_by_name(name: str, value: object, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_options("testing", {name: value}, Settings)
    assert str(caught.value).startswith(f"testing: option {name!r} is ")
    assert told in str(caught.value)


def test_a_value_of_the_wrong_type_in_a_mapping_is_named_by_its_key() -> None:
    with pytest.raises(OptionError, match=r"testing: option 'rates'\[0\] is 1, of type int, expected str"):
        check_options("testing", {"rates": {0: 1}}, Settings)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        OptionError, match="no option 'num_round' \\(did you mean 'num_rounds'\\?\\), expected num_rounds"
    ):
        check_options("testing", {"num_round": 3}, Settings)


def test_a_name_like_no_other_is_refused_with_all_known_ones() -> None:
    with pytest.raises(OptionError, match="no option 'zzz', expected num_rounds, timeout_s"):
        check_options("testing", {"zzz": 3}, Settings)


def test_the_error_is_one_of_configuration_and_one_of_types() -> None:
    assert issubclass(OptionError, ConfigError)
    assert issubclass(OptionError, TypeError)


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(OptionError) as caught:
        check_option("testing", "name", "x" * 10_000, int)
    assert len(str(caught.value)) < 300


def test_a_job_refuses_settings_that_nobody_knows() -> None:
    with pytest.raises(OptionError, match="'snapshot_evry' \\(did you mean 'snapshot_every'\\?\\)"):
        remesh.elastic(lambda job: None, {"dp": -1}, snapshot_evry=10)
