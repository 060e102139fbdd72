"""Write placements.json and overlaps.json anew, from sources other than the code they test.

Placements come from torch's own splitting, overlaps from counting every index. Run from the repository:
``python -m tests.vectors.make``. The two other files are written by hand.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from remesh.layout import (
    Box,
    Layout,
    Mesh,
    Packed,
    Shard as BoxShard,
    Split,
    StridedSplit,
    layout_from_placements,
    layout_from_spec,
    layout_to_json,
)
from tests.support.layouts import missing_by_index, overlap_by_index, shards_of_flat_range

FOLDER = Path(__file__).parent

PLACED = [
    ([10], [2, 4], ["S0", "S0"]),
    ([5], [4], ["S0"]),
    ([3], [4], ["S0"]),
    ([0], [2], ["S0"]),
    ([], [3], ["R"]),
    ([8], [2, 2], ["S0/2", "S0"]),
    ([9], [4], ["S0/2"]),
    ([13], [3], ["S0/4"]),
    ([7, 5], [2, 3], ["S1", "S0"]),
    ([7, 5], [2, 2], ["S1/2", "S1"]),
    ([4, 6], [2, 3], ["R", "S1"]),
    ([6, 4], [2, 2], ["S0/2", "S1"]),
    ([3, 4, 5], [2, 2, 2], ["S2", "S0", "S2"]),
]


def _placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    dim, _, factor = text[1:].partition("/")
    return _StridedShard(int(dim), split_factor=int(factor)) if factor else Shard(int(dim))


def placements() -> list[dict[str, Any]]:
    """Per coordinate (row-major), the flat numbers of the elements in the local tensor, row-major."""
    cases = []
    for shape, mesh_shape, texts in PLACED:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        held = []
        for coordinate in itertools.product(*map(range, mesh_shape)):
            local = whole
            for size, at, text in zip(mesh_shape, coordinate, texts, strict=True):
                if text != "R":
                    local = _placement(text)._split_tensor(local, size, with_padding=False)[0][at]
            held.append(local.reshape(-1).tolist())
        cases.append({"global_shape": shape, "mesh_shape": mesh_shape, "placements": texts, "elements": held})
    return cases


def _pairs() -> list[tuple[str, Layout, Layout]]:
    line, square = Mesh.of({"x": 4}), Mesh.of({"x": 2, "y": 2}, [4, 5, 6, 7])
    rows = layout_from_spec("S0R", (4, 6), line, "int8")
    box = Box.of_shape((4, 6))
    flat = Layout((4, 6), (*shards_of_flat_range(0, box, (0, 7)), *shards_of_flat_range(1, box, (7, 24))), "int8")
    whole = Layout((4, 6), (BoxShard("file:whole", box),), "int8")
    strided = layout_from_placements((4, 6), square, (StridedSplit(0, 2), Split(0)), "int8")
    packed = layout_from_spec("S0R", (4, 6), Mesh.of({"x": 2}), "int8", packed=[Packed(0, (2, 2))])
    scalar = layout_from_spec("", (), Mesh.of({"x": 2}), "int8")
    return [
        ("rows to columns", rows, layout_from_spec("RS01", (4, 6), square, "int8")),
        ("rows to a grid", rows, layout_from_spec("S0S1", (4, 6), square, "int8")),
        (
            "uneven columns to uneven columns",
            layout_from_spec("RS0", (4, 6), line, "int8"),
            layout_from_spec("RS0", (4, 6), Mesh.of({"x": 3}, [7, 8, 9]), "int8", uneven={1: (1, 0, 5)}),
        ),
        ("replicas to a file", layout_from_spec("S0R", (4, 6), square, "int8"), whole),
        ("flat ranges to rows", flat, rows),
        ("strided to packed", strided, packed),
        ("rows and a file to columns", rows.merge(whole), layout_from_spec("RS0", (4, 6), square, "int8")),
        ("survivors only", rows.restrict([0, 3]), layout_from_spec("RS0", (4, 6), square, "int8")),
        ("a scalar", scalar, scalar.map_holders({0: 5, 1: "file:s"})),
        ("nothing", Layout((4, 6), (), "int8"), rows),
    ]


def overlaps() -> list[dict[str, Any]]:
    """Per element that both sides have: its givers and takers; and the elements nobody gives."""
    cases = []
    for name, src, dst in _pairs():
        shared = sorted(overlap_by_index(src, dst).items())
        cases.append(
            {
                "name": name,
                "src": layout_to_json(src),
                "dst": layout_to_json(dst),
                "shared": [
                    {"index": list(index), "givers": _names(givers), "takers": _names(takers)}
                    for index, (givers, takers) in shared
                ],
                "missing": [list(index) for index in sorted(missing_by_index(src, dst))],
            }
        )
    return cases


def _names(shards: frozenset[BoxShard]) -> list[int | str]:
    return sorted((shard.holder for shard in shards), key=lambda holder: (isinstance(holder, str), holder))


def _write(name: str, about: str, cases: list[dict[str, Any]]) -> None:
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    (FOLDER / name).write_text(f'{{\n "about": {json.dumps(about)},\n "cases": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    _write(
        "placements.json",
        "Elements (row-major numbers of the whole tensor) in the local tensor of each coordinate, both row-major. "
        "S<dim> is Shard, S<dim>/<factor> _StridedShard, R Replicate. From torch's own splitting.",
        placements(),
    )
    _write(
        "overlaps.json",
        "For each element that both layouts have, the holders that can give it and those that take it; and the "
        "elements that the destination wants and the source lacks. By counting every index.",
        overlaps(),
    )
