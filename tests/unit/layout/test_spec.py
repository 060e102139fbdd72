"""Sharding specs: the paper's strings, uneven and packed cuts."""

import pytest

from remesh.foundation.errors import LayoutError
from remesh.layout import (
    Mesh,
    Packed,
    Replicate,
    Spec,
    Split,
    layout_from_placements,
    layout_from_spec,
    parse_spec,
)

MESH = Mesh.of({"a": 2, "b": 4})


def _boxes(layout):
    return [str(shard.box) for shard in layout.shards]


@pytest.mark.parametrize("text", ["", "R", "S0R", "S01RR", "RS1R", "S10R", "S1S0", "S(3,12)RS(0,10)"])
def test_a_spec_prints_as_it_reads(text):
    assert str(parse_spec(text)) == text


@pytest.mark.parametrize("text", ["S", "SR", "s0R", "X", "S0 R", "S()", "S(1,)", "S(1", "S0,1R", "R1", "S٣R", "S-1"])
def test_what_is_no_spec_is_named_with_its_position(text):
    with pytest.raises(LayoutError, match="at position"):
        parse_spec(text)


@pytest.mark.parametrize("text", ["S00R", "S0S0", "S(1,1)"])
def test_an_axis_cuts_only_once(text):
    with pytest.raises(LayoutError, match="at most once"):
        parse_spec(text)


def test_s01_cuts_over_both_axes_with_the_first_one_major():
    layout = layout_from_spec("S01R", (8, 2), MESH, "int8")
    assert [shard.box.start[0] for shard in layout.shards] == [0, 1, 2, 3, 4, 5, 6, 7]
    layout = layout_from_spec("S10R", (8, 2), MESH, "int8")
    assert [shard.box.start[0] for shard in layout.shards] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_axes_that_no_dim_uses_replicate():
    layout = layout_from_spec("RS1R", (2, 8, 3), MESH, "int8")
    assert _boxes(layout)[:4] == _boxes(layout)[4:]
    layout.check()


@pytest.mark.parametrize(
    ("text", "placements"), [("S01R", (0, 0)), ("S0S1", (0, 1)), ("RS0", (1, None)), ("RR", (None, None))]
)
def test_ascending_specs_are_dtensors_nested_shards_even_when_uneven(text, placements):
    twins = [Replicate() if dim is None else Split(dim) for dim in placements]
    assert layout_from_spec(text, (10, 7), MESH, "int8") == layout_from_placements((10, 7), MESH, twins, "int8")


def test_uneven_parts_have_the_sizes_they_are_given():
    layout = layout_from_spec("S1R", (10, 2), MESH, "int8", uneven={0: (7, 0, 1, 2)})
    assert _boxes(layout)[:4] == ["[0:7, 0:2]", "[10:10, 0:2]", "[7:8, 0:2]", "[8:10, 0:2]"]
    layout.check()


def test_packed_blocks_are_cut_apart_and_lie_end_to_end_in_the_buffer():
    mesh = Mesh.of({"tp": 2})
    layout = layout_from_spec("S0R", (8, 3), mesh, "int8", packed=[Packed(0, (4, 2, 2))])
    assert [(str(s.box), s.offset) for s in layout.shards_of(0)] == [
        ("[0:2, 0:3]", 0),
        ("[4:5, 0:3]", 6),
        ("[6:7, 0:3]", 9),
    ]
    assert layout.nbytes_of(1) == 12
    layout.check()


def test_packed_blocks_of_an_inner_dim_keep_the_strides_of_the_local_tensor():
    layout = layout_from_spec("RS0", (2, 8), Mesh.of({"tp": 2}), "int8", packed=[Packed(1, (4, 4))])
    assert [(str(s.box), s.offset, s.strides) for s in layout.shards_of(1)] == [
        ("[0:2, 2:4]", 0, (4, 1)),
        ("[0:2, 6:8]", 2, (4, 1)),
    ]


@pytest.mark.parametrize(
    ("spec", "how", "says"),
    [
        ("S0", {}, "it has 1 dims, the tensor of shape .* has 2"),
        ("S2R", {}, "names mesh axis 2, the mesh a=2 x b=4 has 2 axes"),
        ("S0R", {"uneven": {0: (4, 5)}}, "add up to 9, expected 8"),
        ("S0R", {"uneven": {0: (9, -1)}}, "from sizes >= 0"),
        ("S0R", {"uneven": {0: (1, 2, 5)}}, "has 3 uneven sizes .* expected 2"),
        ("S0R", {"uneven": {2: (1, 2)}}, "uneven dim 2"),
        ("S0R", {"packed": [Packed(0, (4, 5))]}, "add up to 9"),
        ("S0R", {"packed": [Packed(0, (4, 4)), Packed(0, (8,))]}, "at most one"),
        ("S0R", {"packed": [Packed(0, (8,))], "uneven": {0: (4, 4)}}, "at most one"),
    ],
)
def test_specs_that_do_not_fit_say_both_numbers(spec, how, says):
    with pytest.raises(LayoutError, match=says):
        layout_from_spec(spec, (8, 4), MESH, "int8", **how)


def test_a_negative_axis_is_refused():
    with pytest.raises(LayoutError, match=">= 0"):
        Spec(((-1,),))
