"""The mesh that a job gets follows from its template and from who is alive, and the reason says so."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from remesh.elasticity.model.mesh_policy import FREE, Memory, MeshChoice, Template, decide_mesh, make_template
from remesh.foundation.errors import ConfigError


def decide(axes: dict[str, Any], num_workers: int, memory: Memory | None = None) -> MeshChoice | str:
    return decide_mesh(make_template(axes, memory), num_workers)


def test_free_axis_takes_all_workers_that_the_fixed_axes_leave() -> None:
    assert decide({"dp": FREE, "tp": 2}, 4) == MeshChoice({"dp": 2, "tp": 2}, 0, "4 workers fit dp=2 x tp=2")


def test_workers_without_a_place_stand_by() -> None:
    choice = decide({"dp": FREE, "tp": 2}, 7)
    assert isinstance(choice, MeshChoice)
    assert (choice.axes, choice.num_standby) == ({"dp": 3, "tp": 2}, 1)


def test_too_few_workers_is_a_reason_with_both_numbers() -> None:
    assert decide({"dp": FREE, "tp": 4}, 3) == "mesh dp=any x tp=4 needs at least 4 workers, 3 are alive"
    assert decide({"pp": [4, 2], "tp": 2}, 3) == "mesh pp=4|2 x tp=2 needs at least 4 workers, 3 are alive"


def test_of_sizes_to_choose_from_the_one_that_puts_most_to_work_wins() -> None:
    choice = decide({"pp": [1, 2, 4], "tp": [2, 3]}, 7)
    assert isinstance(choice, MeshChoice)
    assert (choice.axes, choice.num_standby) == ({"pp": 2, "tp": 3}, 1)


def test_of_equals_the_first_in_its_list_wins() -> None:
    for sizes in ([1, 2, 4], [4, 2, 1]):
        choice = decide({"pp": sizes, "dp": FREE}, 8)
        assert isinstance(choice, MeshChoice)
        assert choice.axes["pp"] == sizes[0]


def test_a_mesh_that_does_not_fit_into_memory_is_not_taken_and_the_reason_says_so() -> None:
    memory = Memory(limit_bytes=60, sharded_bytes=100, over=("pp", "tp"), fixed_bytes=5)
    choice = decide({"pp": [1, 2, 4], "dp": FREE}, 4, Memory(60, 100, ("pp",), 5))
    assert choice == MeshChoice(
        {"pp": 2, "dp": 2}, 0, "4 workers fit pp=2 x dp=2; pp=1 x dp=4 would not fit into a worker's memory"
    )
    told = decide({"pp": 1, "dp": FREE, "tp": 1}, 4, memory)
    assert told == (
        "no mesh of pp=1 x dp=any x tp=1 over 4 workers fits into 60 bytes of a worker; pp=1 x dp=4 x tp=1 needs "
        "the least memory, 105 bytes"
    )


@pytest.mark.parametrize(
    "axes",
    [{}, {"dp": 0}, {"dp": -2}, {"dp": FREE, "tp": FREE}, {"dp": 1.5}, {"dp": []}, {"dp": [FREE, 2]}, {"dp": "2"}],
)
def test_templates_that_make_no_sense_are_refused(axes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mesh template"):
        make_template(axes)


def test_memory_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit 0"):
        Memory(0, 1, ())
    with pytest.raises(ConfigError, match="axis 'ep'"):
        make_template({"dp": FREE}, Memory(10, 1, ("ep",)))


sizes = st.one_of(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=3))
memories = st.one_of(st.none(), st.builds(Memory, st.integers(1, 50), st.integers(0, 100), st.just(("pp",))))
templates = st.builds(
    lambda pp, dp, tp, memory: make_template({"pp": pp, "dp": dp, "tp": tp}, memory),
    sizes,
    st.one_of(st.just(FREE), sizes),
    sizes,
    memories,
)


@given(templates, st.integers(0, 60))
def test_the_choice_is_that_of_trying_every_shape(template: Template, num_workers: int) -> None:
    best = 0
    for pp, tp in itertools.product(template.axes["pp"], template.axes["tp"]):
        listed = template.axes["dp"]
        for dp in range(1, num_workers + 1) if listed == (FREE,) else listed:
            shape = {"pp": pp, "dp": dp, "tp": tp}
            memory = template.memory
            fits = memory is None or memory.needed_bytes(shape) <= memory.limit_bytes
            if fits and math.prod(shape.values()) <= num_workers:
                best = max(best, math.prod(shape.values()))
    choice = decide_mesh(template, num_workers)
    assert (0 if isinstance(choice, str) else choice.size) == best
    if isinstance(choice, MeshChoice):
        assert choice.size + choice.num_standby == num_workers
        assert all(size in template.axes[axis] or template.axes[axis] == (FREE,) for axis, size in choice.axes.items())


@given(templates)
def test_templates_come_through_json_whole(template: Template) -> None:
    assert Template.from_json(json.loads(json.dumps(template.to_json()))) == template


@pytest.mark.parametrize("axes", [{}, {"a": -1, "b": -1}, "dp", ["dp"], 3, None, {1: 2}, {"dp": "2"}, {"dp": 1.5}])
def test_what_is_no_template_is_a_config_error(axes: Any) -> None:
    with pytest.raises(ConfigError, match="reading mesh template"):
        make_template(axes)
