"""What a rank that is alone remembers, and how options that differ are named."""

from __future__ import annotations

from typing import Any

import pytest

from remesh.comm import agreement as module
from remesh.comm.agreement import Agreement, Agreements, check_alike
from remesh.foundation.options import OptionError


def agree(agreements: Agreements, parts: list[Any], beside: Any = None) -> Agreement[Any]:
    agreement = agreements.agree(lambda: (parts, beside))
    agreements.remember(agreement)
    return agreement


@pytest.mark.parametrize("at_once", [False, True])
def test_the_same_parts_find_the_same_epoch_and_tell_nothing(at_once: bool) -> None:
    agreements = Agreements(tells_first_at_once=at_once)
    first = agree(agreements, [[1, 2], "form"], "beside")
    assert (first.told, first.beside) == ([[[1, 2], "form"]], ["beside"])
    first.agreed.kept["answer"] = 42
    again = agree(agreements, [[1, 2], "form"], "else")
    assert again.agreed is first.agreed
    assert (again.told, again.beside) == (None, ["else"])


def test_no_parts_at_all_of_two_kinds_are_two_agreements() -> None:
    agreements = Agreements()
    for about in ("writers", "index"):
        agreement = agreements.agree(lambda: ([], None), about=about)
        agreement.agreed.kept[about] = 42
        agreements.remember(agreement)
    for about in ("writers", "index"):
        assert agreements.agree(lambda: ([], None), about=about).agreed.kept == {about: 42}


def test_other_parts_make_another_epoch_and_the_least_used_one_goes() -> None:
    agreements = Agreements(max_kept=2)
    agreed = [agree(agreements, [at]).agreed for at in range(2)]
    assert agree(agreements, [0]).agreed is agreed[0]
    assert agree(agreements, [2]).told == [[2]]
    assert agree(agreements, [0]).told is None
    assert agree(agreements, [1]).told == [[1]]


def test_an_error_of_a_rank_leaves_nothing_behind() -> None:
    agreements = Agreements()
    with pytest.raises(ZeroDivisionError):
        agreements.agree(lambda: ([1 // 0], None))
    assert agree(agreements, [1]).told == [[1]]


def test_what_came_to_nothing_is_not_remembered() -> None:
    agreements = Agreements()
    agreements.agree(lambda: ([1], None))
    assert agreements.agree(lambda: ([1], None)).told == [[1]]


@pytest.mark.parametrize(
    ("first", "other", "told"),
    [
        (1, 2, "option rate is 1 on rank 0 and 2 on rank 1"),
        (None, {"a": 1}, "option rate is None on rank 0 and {'a': 1} on rank 1"),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, "option rate['a']['c'] is 2 on rank 0 and 3 on rank 1"),
        ({"a": 1}, {"a": 1, "b": 2}, "option rate['b'] is None on rank 0 and 2 on rank 1"),
        ("x" * 1000, 1, "x... on rank 0"),
    ],
)
def test_an_option_that_differs_is_named_where_it_differs(
    monkeypatch: pytest.MonkeyPatch, first: Any, other: Any, told: str
) -> None:
    monkeypatch.setattr(module, "gather_from", lambda produce, group, doing: [first, other])
    with pytest.raises(OptionError) as caught:
        check_alike([{"rate": "digest 0"}, {"rate": "digest 1"}], lambda name: None, None, "testing")
    assert told in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_value_of_the_step_stays_here_and_what_is_told_of_it_is_heard() -> None:
    thing = [object(), 3]
    agreement = Agreements().agree(lambda: thing, tell=lambda value: ([value[1]], "beside"))
    assert agreement.value is thing
    assert (agreement.told, agreement.beside) == ([[3]], ["beside"])


def test_equal_options_ask_nobody() -> None:
    check_alike([{"rate": 1}, {"rate": 1}], lambda name: pytest.fail("asked"), None, "testing")
