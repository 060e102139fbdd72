"""Operands folded by us are what NumPy makes of them; buffers are read as mpi4py reads them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.mpi.upper.buffers import (
    BOTTOM,
    check_alike,
    parse,
    parse_blocks,
    parse_for,
    parse_typed_blocks,
)
from remesh.mpi.upper.constants import PROC_NULL
from remesh.mpi.upper.datatype import PREDEFINED, Datatype
from remesh.mpi.upper.op import OPS, Op

_NUMPY = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "BXOR": np.bitwise_xor}


@given(
    st.sampled_from(sorted(_NUMPY)),
    st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_integers_fold_as_numpy_folds_them(name: str, operands: list[list[int]]) -> None:
    arrays = [np.array(values, dtype=np.int32) for values in operands]
    with np.errstate(over="ignore"):
        expected = functools.reduce(_NUMPY[name], arrays)
    folded = OPS[name]._fold([memoryview(array.tobytes()) for array in arrays], PREDEFINED["INT"], 3)
    assert np.frombuffer(folded, np.int32).tolist() == expected.tolist()


@pytest.mark.parametrize("num", [2, 200])
def test_floats_fold_in_the_order_of_ranks_bit_by_bit(num: int) -> None:
    arrays = [np.random.default_rng(rank).normal(size=num).astype(np.float32) for rank in range(5)]
    expected = functools.reduce(np.add, arrays)
    folded = OPS["SUM"]._fold([memoryview(array.tobytes()) for array in arrays], PREDEFINED["FLOAT"], num)
    assert bytes(folded) == expected.tobytes()


def test_an_operation_of_the_program_sees_the_lower_rank_first() -> None:
    def join(operand: memoryview, result: memoryview, datatype: object) -> None:
        result[0] = operand[0] * 10 + result[0]

    op = Op.Create(join)
    assert op._fold([memoryview(bytes([n])) for n in (1, 2, 3)], PREDEFINED["BYTE"], 1) == bytes([10 + 23])


def test_the_smaller_index_wins_among_equals() -> None:
    pair = np.dtype([("value", "f8"), ("index", "i4")], align=False)
    operands = [np.array([(2.0, 7), (1.0, 0)], pair), np.array([(2.0, 3), (0.5, 1)], pair)]
    folded = OPS["MINLOC"]._fold([memoryview(one.tobytes()) for one in operands], PREDEFINED["DOUBLE_INT"], 2)
    assert np.frombuffer(folded, pair).tolist() == [(2.0, 3), (0.5, 1)]


@pytest.mark.parametrize(("name", "works"), [("BXOR", True), ("SUM", False), ("LAND", False)])
def test_bytes_have_bits_and_no_value(name: str, works: bool) -> None:
    # What has no datatype, such as a tensor of bfloat16, is sent as bytes: a sum of them would be none.
    message = [bytearray(b"ab"), PREDEFINED["BYTE"]]
    if works:
        OPS[name].Reduce_local(message, [bytearray(2), PREDEFINED["BYTE"]])
    else:
        with pytest.raises(RuntimeError, match="not defined for BYTE"):
            OPS[name].Reduce_local(message, [bytearray(2), PREDEFINED["BYTE"]])
        assert OPS[name]._real(PREDEFINED["UNSIGNED_CHAR"]) is not None


def test_types_come_from_the_buffer() -> None:
    array = np.zeros((2, 3), dtype=np.complex128)
    spec = parse(array)
    assert (spec.count, spec.datatype) == (6, PREDEFINED["C_DOUBLE_COMPLEX"])
    assert parse([array, PREDEFINED["DOUBLE"]]).count == 12
    assert parse([array, (2, 1), PREDEFINED["DOUBLE"]]).start == 8


def test_blocks_with_gaps_are_packed_and_without_are_not() -> None:
    array = np.arange(6, dtype=np.int32)
    dense = parse_blocks([array, [2, 4]], 2)
    assert np.shares_memory(np.frombuffer(dense.payload(), np.int32), array)
    apart = parse_blocks([array, ([1, 2], [0, 3])], 2)
    assert np.frombuffer(apart.payload(), np.int32).tolist() == [0, 3, 4]


_INT, _BYTE = PREDEFINED["INT"], PREDEFINED["BYTE"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (None, TypeError),
        ({1: 2}, TypeError),
        ([bytearray(4)], ValueError),
        ([bytearray(4), 0, 0, "i", None], ValueError),
        ([bytearray(4), 0, "?!"], KeyError),
        ([bytearray(4), -1, "i"], ValueError),
        ([bytearray(4), 1.0, "i"], TypeError),
        ([bytearray(4), 0, -1, "i"], ValueError),
        ([bytearray(4), 0, 2, "i"], ValueError),
        ([bytearray(5), None, 0, "i"], ValueError),
        ([None, 1, "i"], ValueError),
        ([bytearray(4), 0, 1, Datatype()], ValueError),
        ([bytearray(4), Datatype()], ValueError),
        ([bytearray(4), _INT.Create_resized(0, -4)], ValueError),
        (np.zeros(2, ">i4"), BufferError),
    ],
)
def test_a_bad_specification_is_refused_as_by_mpi4py(message: Any, error: type[BaseException]) -> None:
    with pytest.raises(error):
        parse(message)


@pytest.mark.parametrize("nothing", [None, BOTTOM])
def test_nothing_is_a_message_if_its_datatype_is_named(nothing: Any) -> None:
    assert [len(parse([nothing, 0, "B"]).payload()), len(parse([nothing, "B"]).landing().view)] == [0, 0]


def test_what_goes_nowhere_is_not_looked_at() -> None:
    assert parse_for(PROC_NULL, object()).num_bytes == 0
    with pytest.raises(TypeError):
        parse_for(0, object())


def test_elements_of_another_byte_order_need_a_datatype() -> None:
    array = np.arange(3, dtype=">i4")
    assert bytes(parse([array, _INT]).payload()) == array.tobytes()


def test_an_inferred_count_must_fill_all_blocks_evenly() -> None:
    assert parse([bytearray(8), "i"], 2).count == 2
    with pytest.raises(ValueError, match="no multiple of 2 blocks"):
        parse([bytearray(12), "i"], 2)


def test_the_first_ranks_get_what_cannot_be_shared_evenly() -> None:
    parts = parse_blocks([bytearray(20), "i"], 3).parts
    assert [(part.start, part.count) for part in parts] == [(0, 2), (8, 2), (16, 1)]


@pytest.mark.parametrize(
    "message",
    [
        [bytearray(4), _BYTE],
        [bytearray(4), [1], [0], [_BYTE], None],
        [BOTTOM, None, [0, 0], [_BYTE] * 2],
        [BOTTOM, [1, 1], None, [_BYTE] * 2],
        [bytearray(4), [1], [0, 0], [_BYTE] * 2],
    ],
)
def test_blocks_with_types_of_their_own_are_counted(message: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_typed_blocks(message, 2)


def test_both_buffers_of_a_reduction_are_alike() -> None:
    four = bytearray(4)
    check_alike(parse([four, 1, "i"]), parse([four, 1, "i"]))
    with pytest.raises(ValueError, match="datatypes"):
        check_alike(parse([four, 1, "i"]), parse([four, 1, "f"]))
    with pytest.raises(ValueError, match="send count 4 and receive count 2"):
        OPS["BOR"].Reduce_local(four, bytearray(2))


def test_a_buffer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        parse([bytearray(4), 2, PREDEFINED["INT"]])
