"""Plans of a rank that is alone: remembered for equal parts, a few of them, and never for others."""

from __future__ import annotations

from typing import Any

import pytest

from remesh.checkpoint.run.plan_cache import Agreement, PlanCache


def agree(cache: PlanCache, parts: list[Any], beside: Any = None) -> Agreement:
    agreement = cache.agree(lambda: (parts, beside))
    cache.remember(agreement)
    return agreement


def test_the_same_parts_find_the_same_plan_and_tell_nothing() -> None:
    cache = PlanCache()
    first = agree(cache, [[1, 2], "form"], "beside")
    assert (first.told, first.beside) == ([[[1, 2], "form"]], ["beside"])
    first.plan.kept["answer"] = 42
    again = agree(cache, [[1, 2], "form"], "else")
    assert again.plan is first.plan
    assert (again.told, again.beside) == (None, ["else"])


def test_other_parts_make_another_plan_and_the_least_used_one_goes() -> None:
    cache = PlanCache(max_plans=2)
    plans = [agree(cache, [at]).plan for at in range(2)]
    assert agree(cache, [0]).plan is plans[0]
    assert agree(cache, [2]).told == [[2]]
    assert agree(cache, [0]).told is None
    assert agree(cache, [1]).told == [[1]]


def test_an_error_of_a_rank_leaves_nothing_behind() -> None:
    cache = PlanCache()
    with pytest.raises(ZeroDivisionError):
        cache.agree(lambda: ([1 // 0], None))
    assert agree(cache, [1]).told == [[1]]


def test_what_came_to_nothing_is_not_remembered() -> None:
    cache = PlanCache()
    cache.agree(lambda: ([1], None))
    assert cache.agree(lambda: ([1], None)).told == [[1]]
