"""JSON form of plans, complete and validated on the way back.

    {"format": "remesh.plan", "version": 4,
     "layouts":  [layout, ...],                       each distinct layout once
     "moves":    [[name, src, dst], ...],             numbers of layouts
     "hosts":    [[rank, host], ...],
     "copies":   [[tensor, [start], [stop], [rank, ...]], ...],
     "bound":    [bytes, reason, seconds or null],
     "network":  network or null,                     see remesh.resharding.model.network
     "rows":     rows or null}                        null: they follow the rule of remesh.resharding.schedule.grid_rows

Rows are written as the columns that they are (`remesh.resharding.schedule.rows`):

    {"ends": "hosts" or "ranks", "period": 8,
     "parts":      [[tensor, ...], [[start], ...], [[stop], ...]],   boxes padded behind with [0, 1)
     "first_part": [...], "rank_sets": [[rank, ...], ...],
     "givers": [...], "takers": [...], "first_chunk": [...],
     "first_hop": [...], "hop_giver": [...], "hop_taker": [...], "hop_time": [...]}

Sizes in bytes are not written: they follow from boxes and dtypes. Reading checks shapes and types here; whether the
whole is a plan is checked when the plan is made (`remesh.resharding.planning.check`). Earlier versions are refused: a
plan is for one run of one job, and is made again from its layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remesh.foundation.errors import LayoutError, PlanError
from remesh.layout import Box, layout_from_json, layout_to_json
from remesh.layout.json_form import read_int, read_ints, read_list, read_text
from remesh.resharding.model.bound import Bound
from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Copy
from remesh.resharding.model.slices import IntArray
from remesh.resharding.model.tasks import TensorMove, number_layouts
from remesh.resharding.schedule.chunks import Chunks, PartRows
from remesh.resharding.schedule.grid_rows import GridRows
from remesh.resharding.schedule.message_rows import MessageRows
from remesh.resharding.schedule.rows import COLUMNS, Ends, Rows, columns_of

FORMAT = "remesh.plan"
VERSION = 4
_LARGEST = 1 << 62


def fields_to_json(
    moves: Sequence[TensorMove], rows: MessageRows, copies: Sequence[Copy], bound: Bound, network: Network | None
) -> dict[str, Any]:
    """JSON values of a plan; equal plans give equal values."""
    layouts, pairs = number_layouts(moves)
    return {
        "format": FORMAT,
        "version": VERSION,
        "layouts": [layout_to_json(layout) for layout in layouts],
        "moves": [[move.name, *pair] for move, pair in zip(moves, pairs, strict=True)],
        "hosts": [[rank, host] for rank, host in rows.host_of.items()],
        "copies": [[copy.tensor, list(copy.box.start), list(copy.box.stop), list(copy.ranks)] for copy in copies],
        "bound": [bound.bytes, bound.reason, bound.seconds],
        "network": None if network is None else network.to_json(),
        "rows": _rows_to_json(rows) if isinstance(rows, Rows) else None,
    }


def _rows_to_json(rows: Rows) -> dict[str, Any]:
    parts = rows.chunks.parts
    return {
        "ends": rows.ends.value,
        "period": rows.period,
        "parts": [parts.tensor.tolist(), parts.starts.tolist(), parts.stops.tolist()],
        "first_part": rows.chunks.first_part.tolist(),
        "rank_sets": [list(ranks) for ranks in rows.rank_sets],
        **{name: column.tolist() for name, column in zip(COLUMNS, columns_of(rows), strict=True)},
    }


def fields_from_json(value: Any) -> dict[str, Any]:
    """The fields of a plan, not yet checked together; raises `PlanError` or `LayoutError`, whatever the values are."""
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") != VERSION:
        found = (value.get("format"), value.get("version")) if isinstance(value, dict) else type(value).__name__
        raise PlanError(
            f"reading a plan: found {found!r}, expected format {FORMAT!r} of version {VERSION}; plan again, and write "
            "it with this version of Remesh"
        )
    try:
        layouts = [layout_from_json(layout) for layout in read_list(value["layouts"], "layouts")]
        moves = tuple(
            TensorMove(read_text(name, "a tensor's name"), layouts[_index(src, layouts)], layouts[_index(dst, layouts)])
            for name, src, dst in read_list(value["moves"], "moves")
        )
        nbytes, reason, seconds = value["bound"]
        hosts = read_list(value["hosts"], "hosts")
        host_of = dict(sorted((read_int(rank, "a rank"), read_text(host, "a host")) for rank, host in hosts))
        is_by_rule = value["rows"] is None
        return {
            "moves": moves,
            "rows": _rows_by_rule(moves, host_of) if is_by_rule else _rows_from_json(value["rows"], moves, host_of),
            "copies": tuple(
                Copy(
                    _index(tensor, moves),
                    Box(read_ints(start, "a copy's start"), read_ints(stop, "a copy's stop")),
                    read_ints(ranks, "a copy's ranks", _LARGEST),
                )
                for tensor, start, stop, ranks in read_list(value["copies"], "copies")
            ),
            "bound": Bound(
                read_int(nbytes, "a bound"),
                read_text(reason, "a bound's reason"),
                None if seconds is None else _seconds(seconds),
            ),
            "network": None if value["network"] is None else Network.from_json(value["network"]),
        }
    except (PlanError, LayoutError):
        raise
    except (KeyError, TypeError, ValueError) as raised:
        raise PlanError(
            f"reading a plan: a field is missing or has another shape than in the format ({raised!r}); plan again"
        ) from raised


def _rows_by_rule(moves: tuple[TensorMove, ...], host_of: Mapping[int, str]) -> GridRows:
    homeless = {rank for move in moves for side in (move.src, move.dst) for rank in side.holders} - host_of.keys()
    rows = None if homeless else GridRows.of(moves, host_of)
    if rows is None:
        raise ValueError("its rows go by rule, but its sides are no grids whose pieces lie within hosts that it has")
    return rows


def _rows_from_json(value: Any, moves: Sequence[TensorMove], host_of: Mapping[int, str]) -> Rows:
    if not isinstance(value, dict):
        raise TypeError(f"expected rows, found {type(value).__name__}")
    tensor, starts, stops = value["parts"]
    ndims = tuple(move.src.ndim for move in moves)
    width = max(ndims, default=0)
    tensors = _column(tensor, len(moves))
    boxes = [np.array([_row(row, width) for row in read_list(side, "boxes")], np.int64) for side in (starts, stops)]
    starts, stops = (side.reshape(len(side), width) for side in boxes)
    if not len(tensors) == len(starts) == len(stops):
        raise ValueError(f"{len(tensors)} parts have {len(starts)} starts and {len(stops)} stops, expected one each")
    itemsizes = np.array([move.src.itemsize_bytes for move in moves], dtype=np.int64)
    nbytes = np.prod(stops - starts, axis=1, dtype=np.int64) * itemsizes[tensors]
    first_part = _column(value["first_part"], len(tensors) + 1)
    if not len(first_part):
        raise ValueError("first_part is empty, expected where chunks begin")
    columns: dict[str, Any] = {name: _column(value[name], _LARGEST) for name in COLUMNS}
    return Rows(
        host_of=host_of,
        ends=Ends(read_text(value["ends"], "ends")),
        period=read_int(value["period"], "a period"),
        chunks=Chunks(PartRows(tensors, starts, stops, nbytes, ndims), first_part),
        rank_sets=tuple(
            read_ints(ranks, "a rank set", _LARGEST) for ranks in read_list(value["rank_sets"], "rank_sets")
        ),
        **columns,
    )


def _row(value: Any, width: int) -> list[int]:
    if len(read_list(value, "a corner of a box")) != width:
        raise ValueError(f"expected {width} coordinates, found {len(value)}")
    return _whole(value, _LARGEST)


def _column(value: Any, limit: int) -> IntArray:
    return np.array(_whole(read_list(value, "a column", _LARGEST), limit), dtype=np.int64)


def _whole(value: list[Any], limit: int) -> list[int]:
    for each in value:
        if type(each) is not int or not 0 <= each < limit:
            raise TypeError(f"expected whole numbers from 0 to {limit - 1}, found {each!r}")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise TypeError(f"expected seconds >= 0, found {value!r}")
    return float(value)


def _index(value: Any, among: Sequence[Any]) -> int:
    if read_int(value, "a number of a plan") >= len(among):
        raise TypeError(f"expected a number below {len(among)}, found {value}")
    return int(value)
