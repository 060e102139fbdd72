"""Datatypes, predefined and derived."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from remesh.mpi.native import NATIVE
from remesh.mpi.upper import constants as k
from remesh.mpi.upper import layouts, packing
from remesh.mpi.upper.attributes import Attributes, WithAttributes
from remesh.mpi.upper.basic_types import ALIASES, BASIC, Basic, name_of_code
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.handles import Handle
from remesh.mpi.upper.layouts import Layout
from remesh.mpi.upper.views import byte_view


@dataclass(eq=False)
class _Type:
    """Content of a Datatype."""

    layout: Layout
    basic: Basic | None = None  # if predefined
    leaf: Basic | None = None  # the one predefined datatype that it is made of; None: several
    combiner: int = k.COMBINER_NAMED
    contents: tuple[Sequence[int], Sequence[int], Sequence[_Type]] = ((), (), ())
    """Integers, displacements in bytes, and the types it was made of, which live on when their handles are freed."""
    name: str = ""
    attributes: Attributes = field(default_factory=Attributes)


def _leaf(types: Sequence[_Type]) -> Basic | None:
    leaves = {t.leaf.name if t.leaf else None for t in types}
    return types[0].leaf if len(leaves) == 1 else None


class Datatype(WithAttributes, Handle):
    """A datatype: which bytes of memory are the data of one element."""

    __slots__ = ()

    @property
    def _type(self) -> _Type:
        if self._h is None:
            raise failure("ERR_TYPE", "the datatype is null or has been freed")
        content: _Type = self._h
        return content

    @property
    def _layout(self) -> Layout:
        return self._type.layout

    def _derive(self, layout: Layout, combiner: int, ints: Sequence[int], displacements: Sequence[int] = ()) -> Self:
        content = _Type(layout, None, self._type.leaf, combiner, (list(ints), list(displacements), [self._type]))
        return type(self)._wrap(content)

    # Queries.

    def Get_size(self) -> int:
        return self._layout.size

    def Get_extent(self) -> tuple[int, int]:
        return self._layout.lb, self._layout.extent

    def Get_true_extent(self) -> tuple[int, int]:
        return self._layout.true_lb, self._layout.true_ub - self._layout.true_lb

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        ints, displacements, types = self._type.contents
        return len(ints), len(displacements), 0, len(types), self._type.combiner

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        if self.is_named:
            raise failure("ERR_TYPE", "a predefined datatype has no contents")
        ints, displacements, types = self._type.contents
        return list(ints), list(displacements), [], [Datatype._wrap(one) for one in types]

    def Get_name(self) -> str:
        return "MPI_DATATYPE_NULL" if self._h is None else self._type.name

    def Set_name(self, name: str) -> None:
        self._type.name = name

    size = property(Get_size)
    envelope = property(Get_envelope)
    contents = property(Get_contents)
    name = property(Get_name, Set_name)
    extent = property(lambda self: self._layout.extent)
    lb = property(lambda self: self._layout.lb)
    ub = property(lambda self: self._layout.lb + self._layout.extent)
    true_extent = property(lambda self: self.Get_true_extent()[1])
    true_lb = property(lambda self: self._layout.true_lb)
    true_ub = property(lambda self: self._layout.true_ub)
    combiner = property(lambda self: self._type.combiner)
    is_named = property(lambda self: self._type.combiner == k.COMBINER_NAMED)
    is_predefined = property(lambda self: self._h is None or self._type.combiner in _PREDEFINED_COMBINERS)

    @property
    def typestr(self) -> str:
        if self._h is None:
            return ""
        basic = self._type.basic
        return (basic and basic.typestr) or f"V{self.extent}"

    @property
    def typechar(self) -> str:
        if self._h is None:
            return ""
        basic = self._type.basic
        return (basic and basic.char) or "V"

    def tocode(self) -> str:
        """Character or type string of a predefined datatype."""
        basic = self._type.basic if self else None
        if basic is None or basic.code is None:
            raise ValueError("cannot map to character code or type string")
        return basic.code

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """The predefined datatype of a character or type string."""
        name = name_of_code(code)
        if name is None:
            raise ValueError(f"cannot map code {code!r} to MPI datatype")
        return PREDEFINED[name]

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """Base type (null unless there is exactly one), name of the combiner and its parameters."""
        return decode(self)

    def _reduce(self) -> tuple[Any, ...]:
        if self._h is None:
            return type(self), ()
        base, name, parameters = decode(self)
        return _made_again, (base, f"Create_{name.lower()}", parameters)

    # Constructors.

    def Dup(self) -> Self:
        copy = self._derive(self._layout, k.COMBINER_DUP, ())
        copy._type.name, copy._type.basic = self._type.name, self._type.basic
        self._copy_attributes(copy)
        return copy

    Create_dup = Dup

    def Create_contiguous(self, count: int) -> Self:
        return self._derive(layouts.placed([(0, count, self._layout)]), k.COMBINER_CONTIGUOUS, [count])

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Self:
        layout = layouts.strided(self._layout, count, blocklength, stride * self._layout.extent)
        return self._derive(layout, k.COMBINER_VECTOR, [count, blocklength, stride])

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Self:
        layout = layouts.strided(self._layout, count, blocklength, stride)
        return self._derive(layout, k.COMBINER_HVECTOR, [count, blocklength], [stride])

    def _indexed(self, lengths: Sequence[int], displacements: Sequence[int], unit: int) -> Layout:
        if len(lengths) != len(displacements):
            raise ValueError("mismatch in blocklengths and displacements")
        return layouts.placed([(d * unit, n, self._layout) for n, d in zip(lengths, displacements, strict=True)])

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        layout = self._indexed(blocklengths, displacements, self._layout.extent)
        return self._derive(layout, k.COMBINER_INDEXED, [len(blocklengths), *blocklengths, *displacements])

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        layout = self._indexed(blocklengths, displacements, 1)
        return self._derive(layout, k.COMBINER_HINDEXED, [len(blocklengths), *blocklengths], displacements)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        layout = self._indexed([blocklength] * len(displacements), displacements, self._layout.extent)
        return self._derive(layout, k.COMBINER_INDEXED_BLOCK, [len(displacements), blocklength, *displacements])

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        layout = self._indexed([blocklength] * len(displacements), displacements, 1)
        return self._derive(layout, k.COMBINER_HINDEXED_BLOCK, [len(displacements), blocklength], displacements)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Datatype]
    ) -> Self:
        if not len(blocklengths) == len(displacements) == len(datatypes):
            raise ValueError("mismatch in blocklengths, displacements and datatypes")
        parts = [(d, n, t._layout) for n, d, t in zip(blocklengths, displacements, datatypes, strict=True)]
        contents = ([len(blocklengths), *blocklengths], list(displacements), [t._type for t in datatypes])
        leaf = _leaf([t._type for t in datatypes]) if datatypes else None
        layout = layouts.struct(parts)
        return cls._wrap(_Type(layout, None, leaf, k.COMBINER_STRUCT, contents))

    def Create_resized(self, lb: int, extent: int) -> Self:
        return self._derive(layouts.resized(self._layout, lb, extent), k.COMBINER_RESIZED, (), [lb, extent])

    Resized = Create_resized

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = k.ORDER_C
    ) -> Self:
        step = 1 if order == k.ORDER_C else -1
        fits = all(sub > 0 and at >= 0 and at + sub <= n for n, sub, at in zip(sizes, subsizes, starts, strict=True))
        if not fits:
            raise failure("ERR_ARG", f"subarray {subsizes} at {starts} is not within {sizes}")
        layout = layouts.subarray(self._layout, sizes[::step], subsizes[::step], starts[::step])
        return self._derive(layout, k.COMBINER_SUBARRAY, [len(sizes), *sizes, *subsizes, *starts, order])

    def Create_darray(  # noqa: PLR0913 - MPI's arguments
        self,
        size: int,
        rank: int,
        gsizes: Sequence[int],
        distribs: Sequence[int],
        dargs: Sequence[int],
        psizes: Sequence[int],
        order: int = k.ORDER_C,
    ) -> Self:
        chosen = darray_indices(rank, gsizes, distribs, dargs, psizes)
        step = 1 if order == k.ORDER_C else -1
        layout = layouts.distributed(self._layout, gsizes[::step], chosen[::step])
        ints = [size, rank, len(gsizes), *gsizes, *distribs, *dargs, *psizes, order]
        return self._derive(layout, k.COMBINER_DARRAY, ints)

    @classmethod
    def Create_f90_integer(cls, r: int) -> Datatype:
        name = next((n for n, digits in _F90_INTEGERS if r <= digits), None)
        if name is None:
            raise failure("ERR_ARG", f"no integer has a range of {r} decimal digits")
        return _parametrised(name, k.COMBINER_F90_INTEGER, r)

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Datatype:
        return _parametrised(_f90_real(p, r), k.COMBINER_F90_REAL, p, r)

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Datatype:
        name = {"REAL4": "COMPLEX8", "REAL8": "COMPLEX16", "REAL16": "COMPLEX32"}[_f90_real(p, r)]
        return _parametrised(name, k.COMBINER_F90_COMPLEX, p, r)

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        prefix = {k.TYPECLASS_INTEGER: "INTEGER", k.TYPECLASS_REAL: "REAL", k.TYPECLASS_COMPLEX: "COMPLEX"}
        name = f"{prefix.get(typeclass, 'LOGICAL')}{size}"
        if name not in PREDEFINED:
            raise failure("ERR_ARG", f"there is no Fortran datatype of {size} bytes in this class")
        return PREDEFINED[name]

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Datatype:
        _ = value._type, index._type
        for name in ("SHORT_INT", "INT_INT", "LONG_INT", "FLOAT_INT", "DOUBLE_INT", "LONG_DOUBLE_INT"):
            if index == PREDEFINED["INT"] and value == PREDEFINED[name.removesuffix("_INT")]:
                return PREDEFINED[name]
        return cls()

    # Packing; the external form is MPI's big-endian one.

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        return packing.pack(self._layout, inbuf, outbuf, position)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        return packing.unpack(self._layout, inbuf, position, outbuf)

    def Pack_size(self, count: int, comm: Any) -> int:
        return count * self._layout.size

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        return packing.pack(self._layout, inbuf, outbuf, position, self._turn(datarep))

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        return packing.unpack(self._layout, inbuf, position, outbuf, self._turn(datarep))

    def _turn(self, datarep: str) -> packing.Turn:
        """To the form of this name and back."""
        _check_external(datarep)
        return functools.partial(packing.turned, leaf=self._type.leaf)

    def Pack_external_size(self, datarep: str, count: int) -> int:
        _check_external(datarep)
        return count * self._layout.size

    def Commit(self) -> Self:
        _ = self._type
        return self

    def Free(self) -> None:
        if self.is_predefined:
            raise failure("ERR_TYPE", "the datatype is null, or predefined and cannot be freed")
        self._delete_attributes()
        self._h = None


_PREDEFINED_COMBINERS: tuple[int, ...] = (
    k.COMBINER_NAMED,
    k.COMBINER_F90_INTEGER,
    k.COMBINER_F90_REAL,
    k.COMBINER_F90_COMPLEX,
)


@functools.cache
def _parametrised(name: str, combiner: int, *parameters: int) -> Datatype:
    """Fortran's type of some precision and range, the same for the same. Source: MPI 4.1, section 19.1.9."""
    row = PREDEFINED[name]._type
    return Datatype._wrap(_Type(row.layout, row.basic, row.leaf, combiner, (parameters, (), ())))


def _check_external(datarep: str) -> None:
    if datarep != "external32":
        raise failure("ERR_ARG", f"data representation {datarep!r}, expected 'external32'")


_F90_INTEGERS = (("INTEGER1", 2), ("INTEGER2", 4), ("INTEGER4", 9), ("INTEGER8", 18))


def _f90_real(p: int, r: int) -> str:
    for name, digits, span in (("REAL4", 6, 37), ("REAL8", 15, 307), ("REAL16", 18, 4931)):
        if (p == k.UNDEFINED or p <= digits) and (r == k.UNDEFINED or r <= span):
            return name
    raise failure("ERR_ARG", f"no real has {p} decimal digits and a range of {r}")


def darray_indices(
    rank: int, gsizes: Sequence[int], distribs: Sequence[int], dargs: Sequence[int], psizes: Sequence[int]
) -> list[list[int]]:
    """Indices of each dimension that a process of a grid holds. Source: MPI 4.1, section 5.1.4."""
    coords = []
    left = rank
    for extent in reversed(psizes):
        coords.append(left % extent)
        left //= extent
    chosen = []
    for size, distribution, argument, extent, at in zip(gsizes, distribs, dargs, psizes, coords[::-1], strict=True):
        if distribution == k.DISTRIBUTE_NONE:
            chosen.append(list(range(size)))
            continue
        default = -(-size // extent) if distribution == k.DISTRIBUTE_BLOCK else 1
        block = default if argument == k.DISTRIBUTE_DFLT_DARG else argument
        chosen.append([index for index in range(size) if index // block % extent == at])
    return chosen


def _made_again(base: Datatype, constructor: str, parameters: dict[str, Any]) -> Datatype:
    """A derived datatype out of a pickle."""
    made: Datatype = getattr(base, constructor)(**parameters)
    return made


def decode(datatype: Datatype) -> tuple[Datatype, str, dict[str, Any]]:
    """What :meth:`Datatype.decode` answers: base type, name of the combiner, parameters by name."""
    if datatype.is_named:
        return datatype, "NAMED", {}
    ints, displacements, _, types = datatype.Get_contents()
    base = types[0] if len(types) == 1 else Datatype()
    n = ints[0] if ints else 0
    dims = ints[1:-1]
    grid = ints[3:-1]
    g = ints[2] if len(ints) > 2 else 0
    tell: dict[int, tuple[str, Callable[[], dict[str, Any]]]] = {
        k.COMBINER_DUP: ("DUP", dict),
        k.COMBINER_CONTIGUOUS: ("CONTIGUOUS", lambda: {"count": n}),
        k.COMBINER_VECTOR: ("VECTOR", lambda: dict(zip(("count", "blocklength", "stride"), ints, strict=True))),
        k.COMBINER_HVECTOR: (
            "HVECTOR",
            lambda: {"count": n, "blocklength": ints[1], "stride": displacements[0]},
        ),
        k.COMBINER_INDEXED: (
            "INDEXED",
            lambda: {"blocklengths": ints[1 : n + 1], "displacements": ints[n + 1 :]},
        ),
        k.COMBINER_HINDEXED: ("HINDEXED", lambda: {"blocklengths": ints[1:], "displacements": displacements}),
        k.COMBINER_INDEXED_BLOCK: ("INDEXED_BLOCK", lambda: {"blocklength": ints[1], "displacements": ints[2:]}),
        k.COMBINER_HINDEXED_BLOCK: (
            "HINDEXED_BLOCK",
            lambda: {"blocklength": ints[1], "displacements": displacements},
        ),
        k.COMBINER_STRUCT: (
            "STRUCT",
            lambda: {"blocklengths": ints[1:], "displacements": displacements, "datatypes": list(types)},
        ),
        k.COMBINER_F90_INTEGER: ("F90_INTEGER", lambda: {"r": n}),
        k.COMBINER_F90_REAL: ("F90_REAL", lambda: dict(zip("pr", ints, strict=True))),
        k.COMBINER_F90_COMPLEX: ("F90_COMPLEX", lambda: dict(zip("pr", ints, strict=True))),
        k.COMBINER_RESIZED: ("RESIZED", lambda: {"lb": displacements[0], "extent": displacements[1]}),
        k.COMBINER_SUBARRAY: (
            "SUBARRAY",
            lambda: {"sizes": dims[:n], "subsizes": dims[n : 2 * n], "starts": dims[2 * n : 3 * n], "order": ints[-1]},
        ),
        k.COMBINER_DARRAY: (
            "DARRAY",
            lambda: {
                "size": ints[0],
                "rank": ints[1],
                "gsizes": grid[:g],
                "distribs": grid[g : 2 * g],
                "dargs": grid[2 * g : 3 * g],
                "psizes": grid[3 * g : 4 * g],
                "order": ints[-1],
            },
        ),
    }
    name, parameters = tell[datatype.combiner]
    return base, name, parameters()


def _predefine() -> dict[str, Datatype]:
    table = {}
    for row in BASIC.values():
        layout = layouts.basic(row.size, row.extent, row.alignment)
        if row.kind == "P" and row.size != row.extent:
            # A value with an index has a gap where C aligns.
            head = BASIC[row.name.removesuffix("_INT")].size
            layout = replace(layout, segments=layouts.joined([(0, head), (max(4, head), 4)]))
        table[row.name] = Datatype._wrap(_Type(layout, row, row, name=f"MPI_{row.name}"))
    for alias, name in ALIASES.items():
        table[alias] = table[name]
    return table


PREDEFINED = _predefine()
"""Name, without prefix -> datatype; aliases are the same content under another name."""
DATATYPE_NULL = Datatype()


def Get_address(location: Any) -> int:
    """Address of a buffer in memory."""
    if location is None or isinstance(location, int):
        return 0
    try:
        return int(NATIVE.address_of(location))
    except TypeError:
        return int(NATIVE.address_of(byte_view(location)[0]))


def Aint_add(base: int, disp: int) -> int:
    """Sum of an address and a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """Difference of two addresses."""
    return addr1 - addr2
