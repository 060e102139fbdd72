"""JSON form of layouts, and its strict reader.

The input is untrusted (another rank, a file): every type, key, size and bound is checked, nothing is guessed, and every
fault is a LayoutError. Layouts that are read lie in bounds; their user checks whether they are disjoint and complete.

The form: a layout is ``{"global_shape": [..], "dtype": name, "shards": [..]}`` with ``"partial": op`` when it is
partial. A shard has ``holder``, ``start``, ``stop`` and, when they differ from the defaults, ``offset`` (0),
``strides`` (row-major of the box) and ``addend`` (0). So equal values have equal JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remesh.foundation.errors import LayoutError
from remesh.layout.box import Box, row_major_strides
from remesh.layout.layout import MAX_ELEMENTS, Layout
from remesh.layout.shard import Holder, Shard

Json = dict[str, Any]

_MAX_DIMS = 64
_MAX_NAME = 4096
_MAX_SHARDS = 1 << 24
"""Far above any real job; a reader must not be made to build more."""


def layout_to_json(layout: Layout) -> Json:
    """The JSON form of a layout; ``layout_from_json`` of it is equal to the layout."""
    form: Json = {
        "global_shape": list(layout.global_shape),
        "dtype": layout.dtype,
        "shards": [_shard_to_json(shard) for shard in layout.shards],
    }
    if layout.partial is not None:
        form["partial"] = layout.partial
    return form


def layout_from_json(obj: object) -> Layout:
    """The layout that this JSON value describes, in bounds; LayoutError if it describes none."""
    fields = _fields(obj, "layout", ("global_shape", "dtype", "shards"), ("partial",))
    partial = fields.get("partial")
    layout = Layout(
        read_ints(fields["global_shape"], "global_shape"),
        tuple(_shard_from_json(each) for each in read_list(fields["shards"], "shards")),
        read_text(fields["dtype"], "dtype"),
        None if partial is None else read_text(partial, "partial"),
    )
    layout.check_in_bounds("layout from JSON")
    return layout


def _shard_to_json(shard: Shard) -> Json:
    assert shard.strides is not None
    form: Json = {"holder": shard.holder, "start": list(shard.box.start), "stop": list(shard.box.stop)}
    if shard.offset:
        form["offset"] = shard.offset
    if shard.strides != row_major_strides(shard.box.shape):
        form["strides"] = list(shard.strides)
    if shard.addend:
        form["addend"] = shard.addend
    return form


def _shard_from_json(obj: object) -> Shard:
    fields = _fields(obj, "shard", ("holder", "start", "stop"), ("offset", "strides", "addend"))
    holder = fields["holder"]
    named: Holder = read_text(holder, "holder") if isinstance(holder, str) else read_int(holder, "holder")
    strides = read_ints(fields["strides"], "strides") if "strides" in fields else None
    box = Box(read_ints(fields["start"], "shard start"), read_ints(fields["stop"], "shard stop"))
    return Shard(
        named, box, read_int(fields.get("offset", 0), "offset"), strides, read_int(fields.get("addend", 0), "addend")
    )


def _fields(obj: object, what: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> Mapping[str, object]:
    if not isinstance(obj, dict):
        raise LayoutError(f"reading a {what}: found {type(obj).__name__}, expected an object with {needed}")
    lacking = [key for key in needed if key not in obj]
    unknown = [str(key)[:80] for key in obj if key not in needed and key not in optional]
    if lacking or unknown:
        raise LayoutError(
            f"reading a {what}: it lacks {lacking} and has unknown {unknown[:8]}, expected exactly {needed} and "
            f"perhaps {optional}; it is damaged, or another program wrote it"
        )
    return obj


def read_list(value: object, what: str, max_length: int = _MAX_SHARDS) -> list[Any]:
    """A list; LayoutError for anything else. As the others below."""
    if not isinstance(value, list):
        raise LayoutError(f"reading {what}: found {type(value).__name__}, expected a list")
    if len(value) > max_length:
        raise LayoutError(f"reading {what}: found {len(value)} entries, expected at most {max_length}")
    return value


def read_ints(value: object, what: str, max_length: int = _MAX_DIMS) -> tuple[int, ...]:
    """A list of integers."""
    return tuple(read_int(each, what) for each in read_list(value, what, max_length))


def read_int(value: object, what: str) -> int:
    """An integer from 0 on."""
    # bool is an int in Python, and true is no number in JSON.
    if not isinstance(value, int) or isinstance(value, bool):
        raise LayoutError(f"reading {what}: found {type(value).__name__}, expected an integer")
    if not 0 <= value <= MAX_ELEMENTS:
        raise LayoutError(
            f"reading {what}: found {value if abs(value) < 2**70 else 'a huge number'}, expected 0 to 2**60"
        )
    return value


def read_text(value: object, what: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise LayoutError(f"reading {what}: found {type(value).__name__}, expected a string")
    if len(value) > _MAX_NAME:
        raise LayoutError(f"reading {what}: found {len(value)} characters, expected at most {_MAX_NAME}")
    return value
