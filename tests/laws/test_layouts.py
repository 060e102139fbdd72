"""Laws of layouts and their overlaps, against counting every index."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import LayoutError
from remesh.layout import (
    Layout,
    boxes_at,
    compute_missing,
    compute_overlap,
    layout_from_json,
    layout_to_json,
    local_shape_at,
)
from tests.support.layouts import (
    complete_layouts,
    element_of,
    gather_array,
    indices_of,
    layouts,
    meshes,
    missing_by_index,
    overlap_by_index,
    placed_layouts,
    placements,
    scatter_array,
    shapes,
    shards_at,
    unfold,
)


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    shape = draw(shapes())
    return draw(layouts(shape)), draw(layouts(shape))


@given(_pairs())
def test_overlap_covers_every_shared_element_once_with_all_its_holders(pair):
    src, dst = pair
    assert unfold(compute_overlap(src, dst)) == overlap_by_index(src, dst)


@given(_pairs())
def test_overlap_is_symmetric(pair):
    src, dst = pair
    forth = [(each.box, each.givers, each.takers) for each in compute_overlap(src, dst)]
    back = [(each.box, each.takers, each.givers) for each in compute_overlap(dst, src)]
    assert forth == back


@given(_pairs())
def test_slices_come_in_row_major_order_and_by_index(pair):
    overlap = compute_overlap(*pair)
    slices = list(overlap)
    assert [each.box for each in slices] == sorted(each.box for each in slices)
    assert slices == [overlap[i] for i in range(len(overlap))]
    assert overlap.sizes.tolist() == [each.box.size for each in slices]


@given(_pairs())
def test_missing_is_what_the_destination_wants_and_the_source_lacks(pair):
    missing = compute_missing(*pair)
    indices = [index for box in missing for index in indices_of(box)]
    assert len(indices) == len(set(indices))
    assert set(indices) == missing_by_index(*pair)


@given(shapes().flatmap(complete_layouts))
def test_overlap_with_itself_is_its_atoms(layout):
    overlap = compute_overlap(layout, layout)
    assert len(overlap) == len(layout.atoms)
    assert all(each.givers == each.takers for each in overlap)
    assert int(overlap.sizes.sum()) == layout.size


@given(shapes().flatmap(complete_layouts))
def test_every_constructor_makes_a_partition(layout):
    layout.check()
    nobody = Layout(layout.global_shape, (), layout.dtype)
    assert compute_missing(nobody, layout) == tuple(sorted(map(layout.atoms.boxes.box, range(len(layout.atoms)))))


@given(shapes().flatmap(complete_layouts))
def test_scatter_then_gather_is_the_tensor(layout):
    whole = np.arange(1, layout.size + 1).reshape(layout.global_shape)
    assert np.array_equal(gather_array(layout, scatter_array(layout, whole)), whole)


@given(shapes().flatmap(complete_layouts))
def test_a_holder_keeps_its_elements_in_different_places(layout):
    for holder in layout.holders:
        places = [element_of(s, index) for s in layout.shards_of(holder) for index in indices_of(s.box)]
        assert len(places) == len(set(places))
        assert layout.nbytes_of(holder) == 4 * len(places)


@given(shapes().flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape), layouts(shape))))
def test_merge_is_the_union_and_restrict_its_inverse(three):
    a, b, c = three
    assert shards_at(a.merge(b).merge(c)) == shards_at(a.merge(b.merge(c)))
    named = a.map_holders(lambda holder: f"a:{holder}").merge(b)
    names = [holder for holder in named.holders if str(holder).startswith("a:")]
    assert shards_at(named.restrict(names)) == shards_at(a.map_holders({h: f"a:{h}" for h in a.holders}))


@given(shapes().flatmap(layouts))
def test_layout_survives_json(layout):
    form = json.loads(json.dumps(layout_to_json(layout)))
    assert layout_from_json(form) == layout
    assert layout_to_json(layout_from_json(form)) == form


@given(shapes().flatmap(lambda shape: placed_layouts(shape, partial=True)))
def test_partial_layout_survives_json_and_holds_every_addend(layout):
    layout.check_complete()
    assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout


@given(meshes())
def test_a_rank_of_a_mesh_is_at_its_coordinate(mesh):
    assert [mesh.rank_at(mesh.coordinate_of(rank)) for rank in mesh.world_ranks] == list(mesh.world_ranks)


@given(shapes(), meshes(), st.data())
def test_boxes_of_a_coordinate_fill_its_local_buffer(shape, mesh, data):
    chosen = [data.draw(placements(len(shape))) for _ in mesh.shape]
    coordinate = tuple(data.draw(st.integers(0, size - 1)) for size in mesh.shape)
    boxes = boxes_at(shape, mesh.shape, coordinate, chosen)
    local = local_shape_at(shape, mesh.shape, coordinate, chosen)
    assert sum(each.box.size for each in boxes) == int(np.prod(local, dtype=int))
    filled = sorted(
        offset + sum((at - a) * s for at, a, s in zip(index, box.start, strides, strict=True))
        for box, offset, strides in boxes
        for index in indices_of(box)
    )
    assert filled == list(range(len(filled)))


@given(shapes(max_size=4).flatmap(complete_layouts), st.data())
def test_losing_a_holder_loses_exactly_what_only_it_had(layout, data):
    if not layout.holders:
        return
    lost = data.draw(st.sampled_from(layout.holders))
    survivors = layout.restrict(set(layout.holders) - {lost})
    missing = {index for box in compute_missing(survivors, layout) for index in indices_of(box)}
    owners = shards_at(layout)
    assert missing == {index for index, shards in owners.items() if {s.holder for s in shards} == {lost}}
    if missing:
        with pytest.raises(LayoutError, match="no holder has box"):
            survivors.check_complete()
