import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.elastic.mesh_policy import FREE, MeshChoice, check_template, decide_mesh
from remesh.errors import ConfigError


def test_free_axis_takes_all_workers_that_the_fixed_axes_leave() -> None:
    assert decide_mesh({"dp": FREE, "tp": 2}, 4) == MeshChoice({"dp": 2, "tp": 2}, 0, "4 workers fit dp=2 x tp=2")


def test_workers_without_a_place_stand_by() -> None:
    choice = decide_mesh({"dp": FREE, "tp": 2}, 7)
    assert isinstance(choice, MeshChoice)
    assert (choice.axes, choice.num_standby) == ({"dp": 3, "tp": 2}, 1)


def test_too_few_workers_is_a_reason_with_both_numbers() -> None:
    assert decide_mesh({"dp": FREE, "tp": 4}, 3) == "mesh dp=any x tp=4 needs at least 4 workers, 3 are alive"


@pytest.mark.parametrize("template", [{}, {"dp": 0}, {"dp": -2}, {"dp": FREE, "tp": FREE}, {"dp": 1.5}])
def test_templates_that_make_no_sense_are_refused(template: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="mesh template"):
        check_template(template)


@given(fixed=st.integers(1, 8), num_workers=st.integers(0, 200))
def test_every_worker_is_placed_or_stands_by(fixed: int, num_workers: int) -> None:
    choice = decide_mesh({"pp": fixed, "dp": FREE}, num_workers)
    if isinstance(choice, str):
        assert num_workers < fixed
    else:
        assert choice.size + choice.num_standby == num_workers
        assert choice.num_standby < fixed
