"""Laws of boxes and flat ranges, against counting every index."""

import itertools

from hypothesis import given, strategies as st

from remesh.layout import Box, boxes_of_flat_range, flat_range_of_box, subtract_all
from tests.support.layouts import boxes, indices_of, shapes


@st.composite
def _wholes(draw: st.DrawFn) -> Box:
    """The box of a small tensor, sometimes not at the origin."""
    shape = draw(shapes())
    return Box.at([draw(st.integers(0, 3)) for _ in shape], shape)


@st.composite
def _with_boxes(draw: st.DrawFn, count: int) -> list[Box]:
    whole = draw(_wholes())
    return [whole, *(draw(boxes(whole)) for _ in range(count))]


def _set(*each: Box) -> set[tuple[int, ...]]:
    return {index for box in each for index in indices_of(box)}


@given(_with_boxes(2))
def test_intersection_holds_the_indices_of_both(drawn):
    _, a, b = drawn
    shared = a.intersect(b)
    assert (_set(shared) if shared else set()) == _set(a) & _set(b)
    assert shared == b.intersect(a)
    assert shared is None or not shared.is_empty


@given(_with_boxes(3))
def test_intersection_is_associative(drawn):
    _, a, b, c = drawn
    ab, bc = a.intersect(b), b.intersect(c)
    assert (ab and ab.intersect(c)) == (bc and a.intersect(bc))


@given(_with_boxes(2))
def test_difference_is_a_partition_of_what_is_left(drawn):
    _, a, b = drawn
    pieces = a.subtract(b)
    assert len(pieces) <= max(1, 2 * a.ndim)
    assert sum(piece.size for piece in pieces) == len(_set(*pieces))
    assert _set(*pieces) == _set(a) - _set(b)


@given(_with_boxes(5))
def test_difference_of_many_is_a_partition_of_what_is_left(drawn):
    whole, *others = drawn
    pieces = subtract_all(whole, others)
    assert sum(piece.size for piece in pieces) == len(_set(*pieces))
    assert _set(*pieces) == _set(whole) - _set(*others)
    assert list(pieces) == sorted(pieces)
    assert not any(piece.is_empty for piece in pieces)


@given(_with_boxes(1))
def test_containment_means_no_index_outside(drawn):
    whole, a = drawn
    assert whole.contains(a)
    assert a.contains(whole) == (_set(whole) <= _set(a))


@given(_with_boxes(1), st.data())
def test_split_halves_join_to_the_box(drawn, data):
    _, a = drawn
    if a.ndim == 0:
        return
    dim = data.draw(st.integers(0, a.ndim - 1))
    low, high = a.split(dim, data.draw(st.integers(a.start[dim], a.stop[dim])))
    assert low.size + high.size == a.size
    assert _set(low, high) == _set(a)


@given(_with_boxes(1))
def test_runs_are_the_maximal_runs_of_the_flattened_parent(drawn):
    parent, a = drawn
    place = {index: position for position, index in enumerate(indices_of(parent))}
    runs = list(a.runs(parent)) if not a.is_empty else []
    assert [start + i for start, length in runs for i in range(length)] == [place[index] for index in indices_of(a)]
    assert all(start + length < following for (start, length), (following, _) in itertools.pairwise(runs))


@given(_wholes(), st.data())
def test_boxes_of_a_flat_range_are_the_range_in_order(whole, data):
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.size)] * 2)))
    pieces = boxes_of_flat_range(whole, start, stop)
    assert [index for piece in pieces for index in indices_of(piece)] == indices_of(whole)[start:stop]
    assert len(pieces) <= max(1, 2 * whole.ndim - 1)
    assert not any(piece.is_empty for piece in pieces)


@given(_wholes(), st.data())
def test_flat_pieces_are_runs_that_meet_end_to_end(whole, data):
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.size)] * 2)))
    at = start
    for piece in boxes_of_flat_range(whole, start, stop):
        assert flat_range_of_box(whole, piece) == (at, at + piece.size)
        at += piece.size
    assert at == stop


@given(_with_boxes(1))
def test_flat_range_of_a_box_is_its_only_run(drawn):
    parent, a = drawn
    found = flat_range_of_box(parent, a)
    if a.is_empty:
        assert found is not None and found[0] == found[1]
        return
    runs = list(a.runs(parent))
    assert found == ((runs[0][0], sum(runs[0])) if len(runs) == 1 else None)
    if found is not None:
        assert boxes_of_flat_range(parent, *found) == (a,)
