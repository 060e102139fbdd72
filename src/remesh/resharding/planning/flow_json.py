"""How are flows written down? As the columns that they are.

{"parts":     [[tensor, ...], [[start], ...], [[stop], ...]],   boxes padded behind with [0, 1)
 "first_part": [...], "rank_sets": [[rank, ...], ...],
 "givers": [...], "takers": [...], "first_chunk": [...],         see remesh.resharding.schedule.flows
 "hosts": [name, ...],
 "first_hop": [...], "hop_giver": [...], "hop_taker": [...], "hop_colour": [...]}
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remesh.resharding.model.slices import IntArray
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.schedule.flows import COLUMNS, Flows, columns_of
from remesh.resharding.schedule.parts import Chunks, PartRows

_LARGEST = 1 << 62


def flows_to_json(flows: Flows) -> dict[str, Any]:
    """JSON values of flows, without the hosts of ranks; equal flows give equal values."""
    parts = flows.chunks.parts
    return {
        "parts": [parts.tensor.tolist(), parts.starts.tolist(), parts.stops.tolist()],
        "first_part": flows.chunks.first_part.tolist(),
        "rank_sets": [list(ranks) for ranks in flows.rank_sets],
        "hosts": list(flows.hosts),
        **{name: column.tolist() for name, column in zip(COLUMNS, columns_of(flows), strict=True)},
    }


def flows_from_json(value: Any, moves: Sequence[TensorMove], host_of: Mapping[int, str]) -> Flows:
    """The flows that these values describe; TypeError, ValueError or KeyError for what has another shape."""
    if not isinstance(value, dict):
        raise TypeError(f"expected flows, found {type(value).__name__}")
    tensor, starts, stops = value["parts"]
    ndims = tuple(move.src.ndim for move in moves)
    width = max(ndims, default=0)
    tensors = _column(tensor, len(moves))
    boxes = [np.array([_row(row, width) for row in _list(side)], np.int64) for side in (starts, stops)]
    starts, stops = (side.reshape(len(side), width) for side in boxes)
    if not len(tensors) == len(starts) == len(stops):
        raise ValueError(f"{len(tensors)} parts have {len(starts)} starts and {len(stops)} stops, expected one each")
    itemsizes = np.array([move.src.itemsize_bytes for move in moves], dtype=np.int64)
    nbytes = np.prod(stops - starts, axis=1, dtype=np.int64) * itemsizes[tensors]
    first_part = _column(value["first_part"], len(tensors) + 1)
    if not len(first_part):
        raise ValueError("first_part is empty, expected where chunks begin")
    columns = {name: _column(value[name], _LARGEST) for name in COLUMNS}
    hosts = tuple(_list(value["hosts"]))
    if not all(isinstance(host, str) for host in hosts):
        raise TypeError("expected names of hosts")
    return Flows(
        host_of=host_of,
        chunks=Chunks(PartRows(tensors, starts, stops, nbytes, ndims), first_part),
        rank_sets=tuple(tuple(_column(ranks, _LARGEST).tolist()) for ranks in _list(value["rank_sets"])),
        hosts=hosts,
        **columns,
    )


def update_with_flows(digest: hashlib._Hash, flows: Flows) -> None:
    """Let a digest depend on all that flows are, the hosts of ranks aside."""
    sizes = np.array([len(ranks) for ranks in flows.rank_sets], dtype=np.int64)
    ranks = np.array([rank for each in flows.rank_sets for rank in each], dtype=np.int64)
    for column in (sizes, ranks, *flows.chunks.columns(), *columns_of(flows)):
        digest.update(f"{column.shape}".encode())
        digest.update(column.astype("<i8").tobytes())


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def _row(value: Any, width: int) -> list[int]:
    if len(_list(value)) != width:
        raise ValueError(f"expected {width} coordinates, found {len(value)}")
    return _whole(value, _LARGEST)


def _column(value: Any, limit: int) -> IntArray:
    return np.array(_whole(_list(value), limit), dtype=np.int64)


def _whole(value: list[Any], limit: int) -> list[int]:
    for each in value:
        if type(each) is not int or not 0 <= each < limit:
            raise TypeError(f"expected whole numbers from 0 to {limit - 1}, found {each!r}")
    return value
