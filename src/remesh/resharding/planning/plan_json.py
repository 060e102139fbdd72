"""How is a plan written down? Its JSON form, complete and validated on the way back.

    {"format": "remesh.plan", "version": 2,
     "layouts":  [layout, ...],                       each distinct layout once
     "moves":    [[name, src, dst], ...],             numbers of layouts
     "hosts":    [[rank, host], ...],
     "chunks":   [[[tensor, [start], [stop]], ...], ...],
     "messages": [[round, giver, taker, chunk], ...],
     "copies":   [[tensor, [start], [stop], [rank, ...]], ...],
     "bound":    [bytes, reason, seconds or null],
     "network":  network or null,                     see remesh.resharding.model.network
     "flows":    flows or null,                       see remesh.resharding.planning.flow_json
     "shifts":   true}                                only in version 3: see remesh.resharding.schedule.shifts

A plan of flows has empty lists of chunks and messages. Version 1 had no flows; it is read as well. Version 3 is that of
plans by rule, which have neither: their messages follow from moves and hosts.

Sizes in bytes are not written: they follow from boxes and dtypes. Reading checks shapes and types here; whether the
whole is a plan is checked when the plan is made (`remesh.resharding.planning.check`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remesh.foundation.errors import LayoutError, PlanError
from remesh.layout import Box, Layout, layout_from_json, layout_to_json
from remesh.resharding.model.bound import Bound
from remesh.resharding.model.network import Network
from remesh.resharding.model.program import Copy, Message
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.planning.flow_json import flows_from_json, flows_to_json, update_with_flows
from remesh.resharding.schedule.compact import CompactMessages
from remesh.resharding.schedule.flow_messages import FlowMessages
from remesh.resharding.schedule.shift_messages import ShiftChunks, ShiftMessages
from remesh.resharding.schedule.shifts import Shifts
from remesh.resharding.schedule.stream import Chunk, Part

FORMAT = "remesh.plan"
VERSION = 2
VERSION_BY_RULE = 3
_READ = (1, VERSION, VERSION_BY_RULE)


@dataclass(frozen=True, slots=True)
class PlanFields:
    """The fields of a plan, not yet checked together."""

    moves: tuple[TensorMove, ...]
    host_of: Mapping[int, str]
    chunks: Sequence[Chunk]
    messages: Sequence[Message]
    copies: tuple[Copy, ...]
    bound: Bound
    network: Network | None = None


def fields_to_json(fields: PlanFields) -> dict[str, Any]:
    """JSON values of a plan; equal plans give equal values."""
    flows = fields.messages.flows if isinstance(fields.messages, FlowMessages) else None
    is_named = not isinstance(fields.messages, CompactMessages)
    number_of, by_id = _number_layouts(fields)
    return _header_to_json(fields, by_id) | {
        "layouts": [layout_to_json(layout) for layout in number_of],
        "chunks": [
            [[part.tensor, list(part.box.start), list(part.box.stop)] for part in chunk.parts]
            for chunk in (fields.chunks if is_named else ())
        ],
        "messages": [
            [each.round, each.giver, each.taker, each.chunk] for each in (fields.messages if is_named else ())
        ],
        "copies": [
            [copy.tensor, list(copy.box.start), list(copy.box.stop), list(copy.ranks)] for copy in fields.copies
        ],
        "flows": None if flows is None else flows_to_json(flows),
    }


def digest_of(fields: PlanFields) -> str:
    """SHA-256, in hexadecimal; equal exactly when plans are."""
    # The same values as in the JSON form, told in fewer words.
    number_of, by_id = _number_layouts(fields)
    layouts = [
        [
            x.global_shape,
            x.dtype,
            x.partial,
            *((s.holder, *_ends(s.box), s.offset, s.strides, s.addend) for s in x.shards),
        ]
        for x in number_of
    ]
    is_small = not isinstance(fields.messages, CompactMessages)
    chunks = [[(p.tensor, *_ends(p.box)) for p in chunk.parts] for chunk in (fields.chunks if is_small else ())]
    messages = [(m.round, m.giver, m.taker, m.chunk) for m in (fields.messages if is_small else ())]
    copies = [(copy.tensor, *_ends(copy.box), copy.ranks) for copy in fields.copies]
    header = _header_to_json(fields, by_id) | {"layouts": layouts}
    text = json.dumps([header, chunks, messages, copies], sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode())
    if isinstance(fields.messages, FlowMessages):
        update_with_flows(digest, fields.messages.flows)
    return digest.hexdigest()


def _ends(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.start, box.stop


def _number_layouts(fields: PlanFields) -> tuple[dict[Layout, int], dict[int, int]]:
    """A number for each distinct layout, by value and by identity."""
    number_of: dict[Layout, int] = {}
    by_id: dict[int, int] = {}
    for move in fields.moves:
        for layout in (move.src, move.dst):
            if id(layout) not in by_id:
                by_id[id(layout)] = number_of.setdefault(layout, len(number_of))
    return number_of, by_id


def _header_to_json(fields: PlanFields, by_id: Mapping[int, int]) -> dict[str, Any]:
    """All that is short."""
    by_rule = {"shifts": True} if isinstance(fields.messages, ShiftMessages) else {}
    return by_rule | {
        "format": FORMAT,
        "version": VERSION_BY_RULE if by_rule else VERSION,
        "moves": [[move.name, by_id[id(move.src)], by_id[id(move.dst)]] for move in fields.moves],
        "hosts": [[rank, host] for rank, host in fields.host_of.items()],
        "bound": [fields.bound.bytes, fields.bound.reason, fields.bound.seconds],
        "network": None if fields.network is None else fields.network.to_json(),
    }


def fields_from_json(value: Any) -> PlanFields:
    """The fields that these JSON values describe; raises `PlanError` or `LayoutError`, whatever they are."""
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") not in _READ:
        found = (value.get("format"), value.get("version")) if isinstance(value, dict) else type(value).__name__
        raise PlanError(
            f"reading a plan: found {found!r}, expected format {FORMAT!r} of version {VERSION}; write it with this "
            "version of Remesh"
        )
    try:
        layouts = [layout_from_json(layout) for layout in _list(value["layouts"])]
        moves = tuple(
            TensorMove(_text(name), layouts[_index(src, layouts)], layouts[_index(dst, layouts)])
            for name, src, dst in _list(value["moves"])
        )
        itemsizes = [move.src.itemsize_bytes for move in moves]
        nbytes, reason, seconds = value["bound"]
        host_of = dict(sorted((_number(rank), _text(host)) for rank, host in _list(value["hosts"])))
        chunks: Sequence[Chunk] = tuple(_chunk(parts, itemsizes) for parts in _list(value["chunks"]))
        messages: Sequence[Message] = tuple(
            Message(*(_number(each) for each in (round_, giver, taker, chunk)))
            for round_, giver, taker, chunk in _list(value["messages"])
        )
        others = [name for name in ("flows", "shifts") if value.get(name)]
        if len(others) + bool(chunks or messages) > 1:
            raise ValueError(f"a plan has {' and '.join(others)} and chunks or messages besides, expected one of them")
        if value.get("flows") is not None:
            flows = flows_from_json(value["flows"], moves, host_of)
            chunks, messages = flows.chunks, FlowMessages(flows)
        if (value["version"] == VERSION_BY_RULE) != (value.get("shifts") is True):
            raise ValueError(f"version {value['version']} has shifts {value.get('shifts')!r}")
        if value.get("shifts"):
            shifts = _shifts_of(moves, host_of)
            chunks, messages = ShiftChunks(shifts), ShiftMessages(shifts)
        return PlanFields(
            moves=moves,
            host_of=host_of,
            chunks=chunks,
            messages=messages,
            copies=tuple(
                Copy(_index(tensor, moves), _box(start, stop), tuple(_number(rank) for rank in _list(ranks)))
                for tensor, start, stop, ranks in _list(value["copies"])
            ),
            bound=Bound(_number(nbytes), _text(reason), None if seconds is None else _seconds(seconds)),
            network=None if value["network"] is None else Network.from_json(value["network"]),
        )
    except (PlanError, LayoutError):
        raise
    except (KeyError, TypeError, ValueError) as raised:
        raise PlanError(
            f"reading a plan: a field is missing or has another shape than the format says ({raised!r}); plan again"
        ) from raised


def _shifts_of(moves: tuple[TensorMove, ...], host_of: Mapping[int, str]) -> Shifts:
    homeless = {rank for move in moves for side in (move.src, move.dst) for rank in side.holders} - host_of.keys()
    shifts = None if homeless else Shifts.of(moves, host_of)
    if shifts is None:
        raise ValueError(
            "its messages go by rule, but its sides are no grids whose pieces lie within hosts that it has"
        )
    return shifts


def _chunk(parts: Any, itemsizes: Sequence[int]) -> Chunk:
    made = []
    for tensor, start, stop in _list(parts):
        box = _box(start, stop)
        made.append(Part(tensor, box, box.size * itemsizes[_index(tensor, itemsizes)]))
    return Chunk(tuple(made), sum(part.nbytes for part in made))


def _box(start: Any, stop: Any) -> Box:
    return Box(tuple(_number(each) for each in _list(start)), tuple(_number(each) for each in _list(stop)))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected a whole number >= 0, found {value!r}")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise TypeError(f"expected seconds >= 0, found {value!r}")
    return float(value)


def _index(value: Any, among: Sequence[Any]) -> int:
    if _number(value) >= len(among):
        raise TypeError(f"expected a number below {len(among)}, found {value}")
    return int(value)
