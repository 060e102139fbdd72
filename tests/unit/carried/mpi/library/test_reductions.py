"""Predefined operations of the C library are what NumPy makes of values; pairs and the program's own by hand."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.unit.carried.mpi.library.building import output

pytestmark = pytest.mark.procs

_INTEGERS = {
    "CHAR": "i1",
    "SIGNED_CHAR": "i1",
    "UNSIGNED_CHAR": "u1",
    "SHORT": "i2",
    "UNSIGNED_SHORT": "u2",
    "INT": "i4",
    "UNSIGNED": "u4",
    "LONG": "i8",
    "UNSIGNED_LONG": "u8",
    "LONG_LONG": "i8",
    "UNSIGNED_LONG_LONG": "u8",
    **{f"INT{bits}_T": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}_T": f"u{bits // 8}" for bits in (8, 16, 32, 64)},
    "AINT": "i8",
    "OFFSET": "i8",
    "COUNT": "i8",
    "INTEGER": "i4",
}
_REALS = {"FLOAT": "f4", "DOUBLE": "f8", "LONG_DOUBLE": "f16", "REAL": "f4", "DOUBLE_PRECISION": "f8"}
_COMPLEX = {
    "C_FLOAT_COMPLEX": "c8",
    "C_DOUBLE_COMPLEX": "c16",
    "C_LONG_DOUBLE_COMPLEX": "c32",
    "COMPLEX": "c8",
    "DOUBLE_COMPLEX": "c16",
}
_LOGICALS = {"C_BOOL": "?", "LOGICAL": "u4"}
_ARITHMETIC = {"SUM": np.add, "PROD": np.multiply}
_ORDER = {"MAX": np.maximum, "MIN": np.minimum}
_LOGICAL = {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}
_BITS = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
_PAIRS = {
    "SHORT_INT": "hxxi",
    "2INT": "ii",
    "LONG_INT": "qixxxx",
    "FLOAT_INT": "fi",
    "DOUBLE_INT": "dixxxx",
    "2INTEGER": "ii",
    "2REAL": "ff",
    "2DOUBLE_PRECISION": "dd",
}
_COUNT = 23


def _values(kind: str, seed: int) -> np.ndarray:
    """Some of any value, and some small ones, so that zeros and equal ones are among them."""
    chosen = np.random.default_rng(seed)
    small = chosen.integers(0, 3, _COUNT)
    if kind[0] in "iu":
        info = np.iinfo(kind)
        wide = chosen.integers(info.min, info.max, _COUNT, dtype=kind, endpoint=True)
        return np.where(chosen.random(_COUNT) < 0.4, small, wide).astype(kind)
    if kind == "?":
        return small.astype(bool)
    reals = np.where(chosen.random(_COUNT) < 0.4, small, chosen.normal(size=_COUNT))
    return (reals + (1j * chosen.normal(size=_COUNT) if kind[0] == "c" else 0)).astype(kind)


def _reduced(program: Path, op: str, name: str, left: bytes, right: bytes, count: int = _COUNT) -> str:
    lines = [f"reduce {op} {name} {count} {len(left)}", *(" ".join(f"{b:02x}" for b in one) for one in (left, right))]
    return output(program, lines)[0]


def _cases() -> list[tuple[str, str, str]]:
    cases = []
    for types, groups in (
        (_INTEGERS, (_ARITHMETIC, _ORDER, _LOGICAL, _BITS)),
        (_REALS, (_ARITHMETIC, _ORDER, _LOGICAL)),
        (_COMPLEX, (_ARITHMETIC,)),
        (_LOGICALS, (_LOGICAL,)),
        ({"BYTE": "u1"}, (_BITS,)),
    ):
        cases += [(op, name, kind) for name, kind in types.items() for group in groups for op in group]
    return cases


def test_predefined_operations_are_numpys(lone_program: Path) -> None:
    functions = {**_ARITHMETIC, **_ORDER, **_LOGICAL, **_BITS}
    lines, expected = [], []
    for seed, (op, name, kind) in enumerate(_cases()):
        left, right = _values(kind, seed), _values(kind, seed + 10_000)
        lines.append(f"reduce {op} {name} {_COUNT} {left.nbytes}")
        lines += [" ".join(f"{byte:02x}" for byte in one.tobytes()) for one in (left, right)]
        with np.errstate(all="ignore"):
            expected.append((op, name, functions[op](left, right).astype(kind)))
    for said, (op, name, values) in zip(output(lone_program, lines), expected, strict=True):
        found = np.frombuffer(bytes.fromhex(said), values.dtype)
        np.testing.assert_allclose(found, values, rtol=1e-6 if values.dtype.kind in "fc" else 0, err_msg=f"{op} {name}")


@pytest.mark.parametrize("name", sorted(_PAIRS))
@pytest.mark.parametrize("op", ["MINLOC", "MAXLOC"])
def test_of_equal_values_the_smaller_index_is_kept(lone_program: Path, op: str, name: str) -> None:
    form = struct.Struct("=" + _PAIRS[name])
    chosen = random.Random(f"{op} {name}")
    pairs = [[(chosen.randrange(-2, 3), chosen.randrange(9)) for _ in range(_COUNT)] for _ in range(2)]
    left, right = (b"".join(form.pack(*pair) for pair in some) for some in pairs)
    sign = 1 if op == "MINLOC" else -1
    best = [min(a, b, key=lambda pair: (sign * pair[0], pair[1])) for a, b in zip(*pairs, strict=True)]
    assert [
        tuple(map(int, one)) for one in form.iter_unpack(bytes.fromhex(_reduced(lone_program, op, name, left, right)))
    ] == best


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("SUM", "BYTE"),
        ("MAX", "C_FLOAT_COMPLEX"),
        ("BAND", "DOUBLE"),
        ("SUM", "C_BOOL"),
        ("MINLOC", "INT"),
        ("SUM", "2INT"),
    ],
)
def test_what_an_operation_is_not_defined_for_is_an_error(lone_program: Path, op: str, name: str) -> None:
    assert _reduced(lone_program, op, name, bytes(16), bytes(16), 1) == "MPI_ERR_OP"


@pytest.mark.parametrize("op", ["REPLACE", "NO_OP"])
def test_operations_of_windows_are_errors_in_every_collective(lone_program: Path, op: str) -> None:
    assert output(lone_program, [f"collectives {op}"]) == ["MPI_ERR_OP"] * 8


def test_the_operation_of_a_program_gets_elements_as_they_stand_in_memory(lone_program: Path) -> None:
    """Two ints with a gap of one int between them: the gap is nobody's."""
    left, right = struct.pack("=3i", 5, 77, 7), struct.pack("=3i", 1, 88, 2)
    lines = ["vector 20 2 2 1 2", "resized 21 2 0 8", f"reduce OWN 21 1 {len(left)}"]
    lines += [" ".join(f"{b:02x}" for b in one) for one in (left, right)]
    assert struct.unpack("=3i", bytes.fromhex(output(lone_program, lines)[0])) == (11, 88, 2)


def test_replace_takes_the_first_operand_and_no_op_the_second(lone_program: Path) -> None:
    assert _reduced(lone_program, "REPLACE", "INT", b"\1\0\0\0", b"\2\0\0\0", 1) == "01000000"
    assert _reduced(lone_program, "NO_OP", "INT", b"\1\0\0\0", b"\2\0\0\0", 1) == "02000000"
