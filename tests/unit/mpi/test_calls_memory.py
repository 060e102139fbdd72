"""MPI.buffer is a run of bytes of somebody's memory; datatypes are known by mpi4py's codes."""

from __future__ import annotations

import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remesh.mpi.upper import constants as k
from remesh.mpi.upper.datatype import DATATYPE_NULL, PREDEFINED, Datatype
from remesh.mpi.upper.environment import Get_abi_fortran_info, Get_abi_info
from remesh.mpi.upper.handles import name_predefined
from remesh.mpi.upper.memory import Alloc_mem, Free_mem, attached, buffer
from remesh.mpi.upper.pickles import Pickle
from remesh.mpi.upper.views import byte_view


def test_a_buffer_is_the_memory_of_its_object() -> None:
    owner = array.array("i", [1, 2, 3])
    lent = buffer(owner)
    assert (lent.address, lent.nbytes, lent.readonly) == (owner.buffer_info()[0], 12, False)
    assert lent.obj is owner and (lent.format, lent.itemsize) == ("B", 1)
    lent[:4] = b"\7\0\0\0"
    assert owner[0] == 7
    assert lent.cast("i").tolist() == [7, 2, 3]


def test_a_buffer_lends_its_memory_to_others() -> None:
    lent = buffer.allocate(8)
    numbers = np.frombuffer(lent, np.int32)
    lent[4] = 5
    assert numbers.tolist()[1] == 5
    lent.release()
    assert (lent.address, len(lent)) == (0, 0) and numbers[1] == 5


def test_an_empty_buffer_is_of_nothing() -> None:
    nothing = buffer()
    assert (nothing.address, nothing.obj, len(nothing), nothing.readonly) == (0, None, 0, False)
    assert buffer.allocate(0).address != 0


def test_memory_by_its_address_is_not_checked_beyond_null_and_negative() -> None:
    numbers = np.arange(4, dtype=np.uint8)
    view = buffer.fromaddress(numbers.ctypes.data, 4, readonly=True)
    assert view.tobytes() == bytes(range(4)) and view.readonly
    for wrong in ((0, 1), (numbers.ctypes.data, -1)):
        with pytest.raises(ValueError, match="expecting"):
            buffer.fromaddress(*wrong)


@pytest.mark.parametrize(
    ("item", "error"), [(4, IndexError), (-5, IndexError), (slice(0, 4, 2), IndexError), (None, TypeError)]
)
def test_a_buffer_is_a_sequence_of_bytes(item: Any, error: type[Exception]) -> None:
    memory = Alloc_mem(4)
    memory[:] = 255
    memory[1:3] = b"ab"
    assert [memory[0], memory[-1], memory[1:3].tobytes()] == [255, 255, b"ab"]
    with pytest.raises(error):
        memory[item]
    with pytest.raises(error):
        memory[item] = 0
    with pytest.raises(ValueError, match="slice of 2 bytes"):
        memory[1:3] = b"abc"
    Free_mem(memory)
    assert len(memory) == 0


def test_what_is_read_only_stays_so() -> None:
    lent = buffer(b"abc")
    with pytest.raises(TypeError, match="read-only"):
        lent[:] = 0
    for take in (buffer.frombuffer, attached):
        with pytest.raises(BufferError, match="not writable"):
            take(b"abc")


def test_an_array_of_a_device_is_taken_only_where_this_process_can_read_it() -> None:
    numbers = np.arange(6, dtype=np.float64)
    told = {"data": (numbers.ctypes.data, False), "typestr": "<f8", "shape": (2, 3), "version": 3}
    owner = SimpleNamespace(__cuda_array_interface__=told)
    view, form = byte_view(owner)
    assert bytes(view) == numbers.tobytes() and form == "d"
    with pytest.raises(BufferError, match="memory of a device"):
        buffer(owner).tobytes()
    told["data"] = (4096, False)
    with pytest.raises(BufferError, match="this process can read"):
        byte_view(owner)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"strides": (8, 8)}, BufferError),
        ({"mask": True}, BufferError),
        ({"shape": (2, -3)}, BufferError),
        ({"shape": 6}, TypeError),
        ({"data": None}, TypeError),
        ({"typestr": "<fX"}, ValueError),
    ],
)
def test_a_bad_array_of_a_device_is_refused_as_by_mpi4py(change: dict[str, Any], error: type[Exception]) -> None:
    numbers = np.arange(6, dtype=np.float64)
    told = {"data": (numbers.ctypes.data, False), "typestr": "<f8", "shape": (2, 3), **change}
    with pytest.raises(error):
        byte_view(SimpleNamespace(__cuda_array_interface__=told))


def test_large_parts_of_a_pickle_are_buffers_and_come_back() -> None:
    serializer = Pickle()
    serializer.THRESHOLD = 16
    numbers = np.arange(4)
    data, apart = serializer.dumps_oob(numbers)
    assert [type(one) for one in apart] == [buffer]
    assert serializer.loads_oob(data, apart).tolist() == [0, 1, 2, 3]
    serializer.THRESHOLD = None
    assert serializer.THRESHOLD == 1 << 18 and not serializer.dumps_oob(numbers)[1]


@pytest.mark.parametrize(
    ("name", "code", "typestr", "char", "alignment"),
    [
        ("CHAR", "c", "S1", "c", 1),
        ("WCHAR", "U", "U1", "U", 4),
        ("C_BOOL", "b1", "b1", "?", 1),
        ("INT", "i", "i4", "i", 4),
        ("INT64_T", "i8", "i8", "l", 8),
        ("AINT", "p", "i8", "p", 8),
        ("LONG_DOUBLE", "g", "f16", "g", 16),
        ("COMPLEX8", "c8", "c8", "F", 4),
        ("LOGICAL", "i", "i4", "i", 4),
        ("LOGICAL16", "i16", "i16", "V", 16),
        ("COMPLEX4", "c4", "c4", "E", 2),
    ],
)
def test_a_datatype_has_the_codes_that_mpi4py_gives_it(
    name: str, code: str, typestr: str, char: str, alignment: int
) -> None:
    datatype = PREDEFINED[name]
    assert (datatype.tocode(), datatype.typestr, datatype.typechar) == (code, typestr, char)
    assert datatype._type.basic is not None and datatype._type.basic.alignment == alignment
    assert Datatype.fromcode(code).typestr == typestr


@pytest.mark.parametrize("code", ["<i4", "V", "O", "", "b2"])
def test_a_code_that_mpi4py_does_not_know_is_none(code: str) -> None:
    with pytest.raises(ValueError, match="cannot map code"):
        Datatype.fromcode(code)


def test_sizes_of_datatypes_are_told_by_their_names() -> None:
    assert dict(Get_abi_info().items())["mpi_aint_size"] == "8"
    told = dict(Get_abi_fortran_info().items())
    assert told["mpi_double_precision_size"] == "8"
    assert told["mpi_real16_supported"] == told["mpi_double_complex_supported"] == "true"


def test_a_type_of_fortran_is_one_object_for_its_parameters() -> None:
    name_predefined({"DATATYPE_NULL": DATATYPE_NULL})
    real = Datatype.Create_f90_real(15, 300)
    assert real == Datatype.Create_f90_real(15, 300) != Datatype.Create_f90_real(15, 299)
    assert (real.combiner, real.is_named, real.is_predefined) == (k.COMBINER_F90_REAL, False, True)
    assert real.decode() == (DATATYPE_NULL, "F90_REAL", {"p": 15, "r": 300})
    assert real.Get_contents() == ([15, 300], [], [], [])
    made, arguments = real.__reduce__()[:2]
    assert made(*arguments) == real and real.tocode() == "f8"


def test_a_value_with_an_index_is_null_unless_c_has_it() -> None:
    assert Datatype.Get_value_index(PREDEFINED["FLOAT"], PREDEFINED["INT"]) == PREDEFINED["FLOAT_INT"]
    assert not Datatype.Get_value_index(PREDEFINED["INT"], PREDEFINED["LONG"])
    with pytest.raises(RuntimeError, match="null"):
        Datatype.Get_value_index(DATATYPE_NULL, PREDEFINED["INT"])
