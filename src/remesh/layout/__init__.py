"""Layouts of tensors: boxes, meshes, holders, and the overlap of two layouts.

Values, frozen and validated; NumPy and the standard library only. Torch enters in
:mod:`remesh.layout.from_torch`, which is imported by name by those who need it.
"""

from remesh.layout.box import Box, row_major_strides
from remesh.layout.cover import subtract_all
from remesh.layout.dtypes import itemsize_bytes
from remesh.layout.flat import boxes_of_flat_range, flat_range_of_box
from remesh.layout.intervals import LocalBox
from remesh.layout.json_form import layout_from_json, layout_to_json
from remesh.layout.layout import Layout
from remesh.layout.mesh import Mesh
from remesh.layout.overlap import Overlap, Slice, compute_missing, compute_overlap, compute_overlaps
from remesh.layout.placement import (
    Partial,
    Placement,
    Replicate,
    Split,
    StridedSplit,
    boxes_at,
    layout_from_placements,
    local_shape_at,
)
from remesh.layout.places import check_places, has_own_places
from remesh.layout.shard import Holder, Shard
from remesh.layout.spec import Packed, Spec, layout_from_spec, parse_spec

__all__ = [
    "Box",
    "Holder",
    "Layout",
    "LocalBox",
    "Mesh",
    "Overlap",
    "Packed",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Slice",
    "Spec",
    "Split",
    "StridedSplit",
    "boxes_at",
    "boxes_of_flat_range",
    "check_places",
    "compute_missing",
    "compute_overlap",
    "compute_overlaps",
    "flat_range_of_box",
    "has_own_places",
    "itemsize_bytes",
    "layout_from_json",
    "layout_from_placements",
    "layout_from_spec",
    "layout_to_json",
    "local_shape_at",
    "parse_spec",
    "row_major_strides",
    "subtract_all",
]
