"""The predefined datatypes, as a table: name, bytes, kind, and the real MPI's name for reductions.

Kinds are NumPy's: ``i`` signed, ``u`` unsigned, ``f`` real, ``c`` complex, ``b`` logical, ``S`` character, ``V`` bytes,
and ``P`` for a value with an index, which MINLOC and MAXLOC take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Basic:
    """One predefined datatype."""

    name: str  # MPI's, without the prefix
    size: int  # bytes of data
    kind: str
    char: str  # of struct and array, mpi4py's ``typechar``; empty if there is none
    extent: int  # bytes from one to the next, larger than the size where C pads
    pair: str = ""  # of a value with an index: struct format

    @property
    def typestr(self) -> str | None:
        """NumPy's type string without byte order; None if it has no such type."""
        if self.char in _TYPESTR_OF_CHAR:
            return _TYPESTR_OF_CHAR[self.char]
        kind = _KIND_OF_STEM.get(self.name.rstrip("0123456789")) if self.kind == "V" else self.kind
        return None if kind in (None, "P") else f"{kind}{self.size}"

    @property
    def code(self) -> str | None:
        """What mpi4py calls it by: the type string where its name has its size, else the character."""
        return self.typestr if self.name.startswith(_SIZED) or self.name[-1].isdigit() else self.char or None

    @property
    def alignment(self) -> int:
        """Bytes that C places it at multiples of."""
        if self.kind == "P":
            return max(4, BASIC[self.name.removesuffix("_INT")].alignment)
        return self.size // 2 if self.kind == "c" or self.char == "E" else self.size


_TYPESTR_OF_CHAR: Final = {"c": "S1", "U": "U1", "B": "u1"}
_KIND_OF_STEM: Final = {"LOGICAL": "i", "INTEGER": "i", "COMPLEX": "c"}
_SIZED: Final = ("INT8_T", "INT16_T", "INT32_T", "INT64_T", "UINT", "C_BOOL")


def _rows() -> list[Basic]:
    plain = """
    PACKED 1 V B; BYTE 1 u B; CHAR 1 S c; WCHAR 4 S U; SIGNED_CHAR 1 i b; UNSIGNED_CHAR 1 u B; SHORT 2 i h;
    UNSIGNED_SHORT 2 u H; INT 4 i i; UNSIGNED 4 u I; LONG 8 i l; UNSIGNED_LONG 8 u L; LONG_LONG 8 i q;
    UNSIGNED_LONG_LONG 8 u Q; FLOAT 4 f f; DOUBLE 8 f d; LONG_DOUBLE 16 f g; C_BOOL 1 b ?; CXX_BOOL 1 b ?;
    INT8_T 1 i b; INT16_T 2 i h; INT32_T 4 i i; INT64_T 8 i l; UINT8_T 1 u B; UINT16_T 2 u H; UINT32_T 4 u I;
    UINT64_T 8 u L; FLOAT16_T 2 f e; FLOAT32_T 4 f f; FLOAT64_T 8 f d; BFLOAT16_T 2 V -;
    C_FLOAT_COMPLEX 8 c F; C_DOUBLE_COMPLEX 16 c D; C_LONG_DOUBLE_COMPLEX 32 c G; CXX_FLOAT_COMPLEX 8 c F;
    CXX_DOUBLE_COMPLEX 16 c D; CXX_LONG_DOUBLE_COMPLEX 32 c G; AINT 8 i p; OFFSET 8 i p; COUNT 8 i p;
    CHARACTER 1 S c; LOGICAL 4 i i; INTEGER 4 i i; REAL 4 f f; DOUBLE_PRECISION 8 f d; COMPLEX 8 c F;
    DOUBLE_COMPLEX 16 c D; LOGICAL1 1 b ?; LOGICAL2 2 i h; LOGICAL4 4 i i; LOGICAL8 8 i l; LOGICAL16 16 V -;
    INTEGER1 1 i b; INTEGER2 2 i h; INTEGER4 4 i i; INTEGER8 8 i l; INTEGER16 16 V -; REAL2 2 f e;
    REAL4 4 f f; REAL8 8 f d; REAL16 16 f g; COMPLEX4 4 V E; COMPLEX8 8 c F; COMPLEX16 16 c D;
    COMPLEX32 32 c G;
    """
    rows = []
    for word in plain.replace("\n", ";").split(";"):
        if word.strip():
            name, size, kind, char = word.split()
            rows.append(Basic(name, int(size), kind, "" if char == "-" else char, int(size)))
    pairs = (("SHORT_INT", "hxxi", 6), ("INT_INT", "ii", 8), ("LONG_INT", "qixxxx", 12), ("FLOAT_INT", "fi", 8))
    for row_name, pair, num_bytes in (*pairs, ("DOUBLE_INT", "dixxxx", 12)):
        rows.append(Basic(row_name, num_bytes, "P", "", 16 if num_bytes == 12 else 8, pair))
    return [*rows, Basic("LONG_DOUBLE_INT", 20, "P", "", 32)]


BASIC: Final = {row.name: row for row in _rows()}
"""Name -> row. Logical values of Fortran reduce as integers do."""

ALIASES: Final = {
    "TWOINT": "INT_INT",
    "C_COMPLEX": "C_FLOAT_COMPLEX",
    "UNSIGNED_INT": "UNSIGNED",
    "SIGNED_SHORT": "SHORT",
    "SIGNED_INT": "INT",
    "SIGNED_LONG": "LONG",
    "SIGNED_LONG_LONG": "LONG_LONG",
    "BOOL": "C_BOOL",
    "SINT8_T": "INT8_T",
    "SINT16_T": "INT16_T",
    "SINT32_T": "INT32_T",
    "SINT64_T": "INT64_T",
    "F_BOOL": "LOGICAL",
    "F_INT": "INTEGER",
    "F_FLOAT": "REAL",
    "F_DOUBLE": "DOUBLE_PRECISION",
    "F_COMPLEX": "COMPLEX",
    "F_FLOAT_COMPLEX": "COMPLEX",
    "F_DOUBLE_COMPLEX": "DOUBLE_COMPLEX",
}

_REAL_BY_KIND: Final = {
    **{("i", n): f"INT{8 * n}_T" for n in (1, 2, 4, 8)},
    **{("u", n): f"UINT{8 * n}_T" for n in (1, 2, 4, 8)},
    ("f", 4): "FLOAT",
    ("f", 8): "DOUBLE",
    ("f", 16): "LONG_DOUBLE",
    ("b", 1): "C_BOOL",
    ("c", 8): "C_FLOAT_COMPLEX",
    ("c", 16): "C_DOUBLE_COMPLEX",
}


def real_name(row: Basic) -> str | None:
    """The real MPI's datatype that reduces such values; None: we fold them ourselves."""
    if row.name == "BYTE":
        return "BYTE"
    return _REAL_BY_KIND.get((row.kind, row.size))


_CHARS: Final = """
? C_BOOL  b SIGNED_CHAR  h SHORT  i INT  l LONG  q LONG_LONG  n COUNT  p AINT
B UNSIGNED_CHAR  H UNSIGNED_SHORT  I UNSIGNED  L UNSIGNED_LONG  Q UNSIGNED_LONG_LONG  N UNSIGNED_LONG  P UNSIGNED_LONG
e FLOAT16_T  f FLOAT  d DOUBLE  g LONG_DOUBLE  c CHAR  S CHAR  s CHAR  U WCHAR  w WCHAR  u UINT16_T
E COMPLEX4  F C_FLOAT_COMPLEX  D C_DOUBLE_COMPLEX  G C_LONG_DOUBLE_COMPLEX
"""
_TYPESTRS: Final = """
b1 C_BOOL  S1 CHAR  U1 WCHAR  i1 INT8_T  i2 INT16_T  i4 INT32_T  i8 INT64_T  u1 UINT8_T  u2 UINT16_T  u4 UINT32_T
u8 UINT64_T  i16 INTEGER16  f2 FLOAT16_T  f4 FLOAT  f8 DOUBLE  f16 LONG_DOUBLE
c4 COMPLEX4  c8 C_FLOAT_COMPLEX  c16 C_DOUBLE_COMPLEX  c32 C_LONG_DOUBLE_COMPLEX
Ze COMPLEX4  Zf C_FLOAT_COMPLEX  Zd C_DOUBLE_COMPLEX  Zg C_LONG_DOUBLE_COMPLEX
"""
_CODES: Final = dict(zip(*[iter((_CHARS + _TYPESTRS).split())] * 2, strict=True))
"""A character of ``struct``, of buffers or of NumPy, or NumPy's type string without byte order -> name."""


def name_of_code(code: str) -> str | None:
    """The predefined datatype of a character (``d``) or a type string (``f8``)."""
    return _CODES.get(code)
