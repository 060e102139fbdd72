"""Generator of ``_calls.h``: the calls, replies, wire messages and channels that C shares with the tables here.

``python -m remesh.carried.mpi.calls.calls_header`` writes it; a test compares it with the tables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from remesh.carried.mpi.calls import table, words
from remesh.carried.mpi.calls.wire_messages import HEADER, HEADER_FIELDS, What

PATH: Final = Path(__file__).parents[1] / "_calls.h"
_TYPES: Final = {
    "B": "uint8_t",
    "i": "int32_t",
    "I": "uint32_t",
    "q": "int64_t",
    "Q": "uint64_t",
    "h": "int16_t",
    "H": "uint16_t",
}
_DEFINED: Final = ("EAGER_BYTES", "ANY", "PARCEL", "OK", "FAILED", "MAX_COUNTS", "MAX_RUNS")
_HEAD: Final = """\
/* Made by `python -m remesh.carried.mpi.calls.calls_header` from the tables of calls/, which describe what everything
 * means. Structs are as they stand in a channel or a message: unaligned, little-endian.
 */
#ifndef REMESH_CALLS_H
#define REMESH_CALLS_H

#include <stdint.h>

#define LAID_OUT __attribute__((packed, may_alias))
"""


def make_header() -> str:
    """The text of ``_calls.h``."""
    parts = [_HEAD]
    parts.append(_define({name: value for name, value in vars(words).items() if name.isupper()}))
    parts.append(_define({name: getattr(table, name) for name in _DEFINED}))
    parts.append(_enumerate("CALL", {call.name: call.number for call in table.CALLS}))
    parts.append(_enumerate("FLAG", _constants(table.CallFlag)))
    parts.append(_enumerate("MODE", _constants(table.WaitFor)))
    parts.append(_enumerate("KIND", table.Kind.__members__))
    parts.append(_enumerate("PAYLOAD", _constants(table.PayloadPlace)))
    parts.append(_enumerate("OP", {name: index for index, name in enumerate(table.ACCESS_OPS)}))
    parts.append(_enumerate("WHAT", What.__members__))
    parts += [_struct(f"{_camel(call.name)}Call", f"<B{call.request}", ("call", *call.fields)) for call in table.CALLS]
    parts += [_struct(name, form.format, fields) for name, (form, fields) in table.RECORDS.items()]
    parts.append(_struct("WireHeader", HEADER.format, HEADER_FIELDS))
    return "\n".join([*parts, "#endif\n"])


def _constants(holder: type) -> dict[str, int]:
    return {name: value for name, value in vars(holder).items() if name.isupper()}


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _define(values: Mapping[str, int]) -> str:
    return "".join(f"#define {name} {f'({value})' if value < 0 else value}\n" for name, value in values.items())


def _enumerate(prefix: str, values: Mapping[str, int]) -> str:
    rows = ", ".join(f"{prefix}_{name.upper()}={int(value)}" for name, value in values.items())
    return _filled(f"enum {{ {rows} }};")


def _struct(name: str, form: str, fields: Iterable[str]) -> str:
    rows = " ".join(f"{_TYPES[letter]} {field};" for letter, field in zip(form[1:], fields, strict=True))
    return _filled(f"typedef struct LAID_OUT {{ {rows} }} {name};")


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, subsequent_indent="    ", break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(make_header())
