"""The conformance vectors in tests/vectors."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from remesh.foundation.errors import LayoutError
from remesh.layout import (
    Box,
    Replicate,
    Split,
    StridedSplit,
    boxes_at,
    boxes_of_flat_range,
    compute_missing,
    compute_overlap,
    flat_range_of_box,
    layout_from_json,
    layout_to_json,
    local_shape_at,
)
from tests.support.layouts import indices_of

VECTORS = Path(__file__).parents[2] / "vectors"


def _cases(name):
    cases = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case.get("name", f"{case.get('global_shape')}")) for case in cases]


def _placement(text):
    if text == "R":
        return Replicate()
    dim, _, factor = text[1:].partition("/")
    return StridedSplit(int(dim), int(factor)) if factor else Split(int(dim))


@pytest.mark.parametrize("case", _cases("placements"))
def test_placements_hold_the_elements_of_the_vectors(case):
    shape, mesh_shape = case["global_shape"], case["mesh_shape"]
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    placements = [_placement(text) for text in case["placements"]]
    for coordinate, expected in zip(itertools.product(*map(range, mesh_shape)), case["elements"], strict=True):
        buffer = np.full(int(np.prod(local_shape_at(shape, mesh_shape, coordinate, placements), dtype=int)), -1)
        for box, offset, strides in boxes_at(shape, mesh_shape, coordinate, placements):
            for index in indices_of(box):
                place = sum((at - a) * s for at, a, s in zip(index, box.start, strides, strict=True))
                buffer[offset + place] = whole[index]
        assert buffer.tolist() == expected


@pytest.mark.parametrize("case", _cases("flat_ranges"))
def test_flat_ranges_are_the_boxes_of_the_vectors(case):
    box = Box(**case["box"])
    pieces = boxes_of_flat_range(box, *case["range"])
    assert pieces == tuple(Box(**one) for one in case["boxes"])
    if len(pieces) == 1:
        assert flat_range_of_box(box, pieces[0]) == tuple(case["range"])


@pytest.mark.parametrize("case", _cases("overlaps"))
def test_overlaps_share_the_elements_of_the_vectors(case):
    src, dst = layout_from_json(case["src"]), layout_from_json(case["dst"])
    found = []
    for each in compute_overlap(src, dst):
        givers, takers = [s.holder for s in each.givers], [s.holder for s in each.takers]
        found += [{"index": list(index), "givers": givers, "takers": takers} for index in indices_of(each.box)]
    assert sorted(found, key=lambda entry: entry["index"]) == case["shared"]
    missing = [list(index) for box in compute_missing(src, dst) for index in indices_of(box)]
    assert sorted(missing) == case["missing"]
    assert layout_to_json(src) == case["src"]


@pytest.mark.parametrize("case", _cases("json_refused"))
def test_what_is_no_layout_is_refused(case):
    with pytest.raises(LayoutError) as raised:
        layout_from_json(case["json"])
    assert case["says"] in str(raised.value)
    assert len(str(raised.value)) < 1000


def _mutations(value):
    """The value with every part in turn replaced by something of another kind."""
    wrong = [None, True, -1, 1.5, "x", [], {}, [[]], 2**200]
    yield from wrong
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            for changed in _mutations(value[key]):
                mutated = copy.copy(value)
                mutated[key] = changed
                yield mutated


def test_any_damage_to_json_is_a_layout_error_or_another_value():
    for mutated in _mutations(json.loads((VECTORS / "overlaps.json").read_text())["cases"][5]["src"]):
        try:
            layout_from_json(mutated)
        except LayoutError:
            continue
