"""Meshes and boxes that cannot be, each told why."""

import pytest

from remesh.foundation.errors import LayoutError
from remesh.layout import Box, Mesh


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mesh(("a",), (2, 2), (0, 1, 2, 3), ("h",) * 4), "1 axis names"),
        (lambda: Mesh(("a", "a"), (1, 1), (0,), ("h",)), "distinct"),
        (lambda: Mesh.of({"": 1}), "not empty"),
        (lambda: Mesh.of({"a": 0}), "sizes >= 1"),
        (lambda: Mesh.of({"a": 2}, [0, 1, 2]), "has 2 places, found 3 ranks"),
        (lambda: Mesh.of({"a": 2}, [1, 1]), "distinct"),
        (lambda: Mesh.of({"a": 2}, [-1, 1]), ">= 0"),
        (lambda: Mesh.of({"a": 2}, hosts=["x"]), "1 hosts"),
        (lambda: Mesh.of({"a": 2}).rank_at((2,)), r"coordinate \(2,\)"),
        (lambda: Mesh.of({"a": 2}).coordinate_of(7), "world rank 7"),
        (lambda: Mesh.of({"a": 2}).host_of(7), "world rank 7"),
    ],
)
def test_a_mesh_that_cannot_be_says_why(make, says):
    with pytest.raises(LayoutError, match=says):
        make()


def test_a_mesh_without_axes_has_one_rank():
    mesh = Mesh.of({}, [7])
    assert (mesh.size, mesh.coordinate_of(7), mesh.rank_at(()), str(mesh)) == (1, (), 7, "1")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Box((0,), (1, 2)), "1 dims but stop"),
        (lambda: Box((3,), (1,)), "runs from 3 to 1"),
        (lambda: Box((-1,), (1,)), "runs from -1"),
        (lambda: Box.at((0, 0), (1,)), "expected the same number"),
        (lambda: Box((0,), (4,)).intersect(Box((0, 0), (1, 1))), "1 and 2 dims"),
        (lambda: Box((0,), (4,)).split(0, 5), "outside the box"),
        (lambda: Box((0,), (4,)).split(1, 0), "outside the box"),
        (lambda: Box((0,), (4,)).translate((1, 2)), "one per dim"),
        (lambda: Box((0,), (4,)).translate((-1,)), "runs from -1"),
        (lambda: Box((2,), (3,)).relative_to(Box((0,), (2,))), "does not lie inside"),
    ],
)
def test_a_box_that_cannot_be_says_why(make, says):
    with pytest.raises(LayoutError, match=says):
        make()


def test_a_box_without_dims_has_one_element():
    scalar = Box((), ())
    assert (scalar.size, scalar.intersect(scalar), scalar.subtract(scalar)) == (1, scalar, ())
    assert list(scalar.runs(scalar)) == [(0, 1)]


def test_a_run_goes_on_over_dims_that_are_spanned_entirely():
    whole, box = Box((0, 0), (4, 6)), Box((1, 2), (3, 4))
    assert list(box.runs(whole)) == [(8, 2), (14, 2)]
    assert list(Box((1, 0), (3, 6)).runs(whole)) == [(6, 12)]
