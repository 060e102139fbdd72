"""A step that every rank does: its value stays, what is told of it is heard, its error is raised."""

import pytest

from remesh.comm.gather import gather_from, step_together
from remesh.foundation.errors import Error


def test_a_step_gives_its_own_value_back_whatever_it_is() -> None:
    thing = object()
    done = step_together(lambda: thing)
    assert done.mine is thing
    assert done.told == [None]


def test_what_is_told_of_a_value_is_heard_as_json_has_it() -> None:
    done = step_together(lambda: {"a": (1, 2), "kept": object()}, tell=lambda value: value["a"])
    assert done.mine["a"] == (1, 2)
    assert done.told == [[1, 2]]


def test_the_error_of_a_step_and_of_telling_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        step_together(lambda: 1 // 0)
    with pytest.raises(KeyError):
        step_together(dict, tell=lambda value: value["absent"])
    with pytest.raises(Error, match="packing: the value of this rank cannot be sent to the others"):
        step_together(object, doing="packing", tell=lambda value: value)


def test_gathering_is_a_step_that_tells_its_value() -> None:
    assert gather_from(lambda: (1, "two")) == [[1, "two"]]
