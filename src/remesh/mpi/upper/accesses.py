"""Reading, writing and folding into the memory of other ranks.

The lower half knows one access: bytes of this process, runs of bytes at the target, and what is done with them
(``lower/accesses.py``). Here datatypes become runs, and the data one contiguous view. Source: MPI 4.1, section 12.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remesh.mpi.calls.table import ACCESS_OPS, BY_NAME, MAX_RUNS, PAIR_FORMATS, REAL_TYPES, RUN
from remesh.mpi.native import NATIVE
from remesh.mpi.upper import constants as k
from remesh.mpi.upper import layouts
from remesh.mpi.upper.basic_types import Basic, real_name
from remesh.mpi.upper.buffers import Aside, Direct, Spec, parse
from remesh.mpi.upper.datatype import Datatype
from remesh.mpi.upper.epochs import Access, Aim, Window
from remesh.mpi.upper.exceptions import failure
from remesh.mpi.upper.link import access_shortly, link, post_access
from remesh.mpi.upper.op import OPS, Op
from remesh.mpi.upper.request import Operation, Request, Work

_ACCESS = BY_NAME["access"]
_SUM, _REPLACE, _NO_OP = OPS["SUM"], OPS["REPLACE"], OPS["NO_OP"]
_EMPTY = memoryview(b"")
_PLAIN = {name: (ACCESS_OPS.index(name), b"") for name in ("REPLACE", "NO_OP")}
"""Numbers, for the short way, of operations on whatever bytes: they have no type."""
_COMPARE_AND_SWAP = (ACCESS_OPS.index("COMPARE_AND_SWAP"), b"")
_OF_ONE = frozenset({"Fetch_and_op", "Compare_and_swap"})
"""Calls whose buffers are one element each."""


@dataclass(frozen=True, slots=True)
class _Verb:
    """What is done at the target, as the lower half numbers it."""

    op: int
    type: int
    unit: int  # bytes of an element, which is never torn


def _real_type(leaf: Basic) -> str | None:
    return leaf.name if leaf.name in PAIR_FORMATS else real_name(leaf)


@dataclass(frozen=True, slots=True)
class _Target:
    """Elements in a target's memory."""

    displacement: int  # in units of the target
    count: int
    datatype: Datatype

    @classmethod
    def of(cls, given: Any, like: Spec) -> _Target:
        """A target as programs write it: None, displacement, or [displacement, count, datatype] from the left."""
        parts = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        if len(parts) > 3 or not all(isinstance(part, (Datatype, str)) or hasattr(part, "__index__") for part in parts):
            raise ValueError("target: expecting a displacement, or up to 3 of displacement, count and datatype")
        datatype = like.datatype
        if parts and isinstance(parts[-1], (Datatype, str)):
            last = parts.pop()
            datatype = Datatype.fromcode(last) if isinstance(last, str) else last
        displacement, count = [*parts, *(0, like.count)[len(parts) :]][:2]
        return cls(int(displacement), int(count), datatype)

    @property
    def num_bytes(self) -> int:
        return self.count * self.datatype._layout.size

    def runs(self, unit: int) -> list[tuple[int, int]]:
        """(bytes from the window's base, bytes), in the order of the data."""
        return layouts.runs(self.datatype._layout, self.displacement * unit, self.count)


def _verb(call: str, op: Op, target: _Target) -> _Verb:
    """ERR_OP if the operation is the program's own, or not for the target's datatype."""
    name, leaf = op._op.name, target.datatype._type.leaf
    unit = 1 if leaf is None else leaf.size
    if not target.count:
        name = "NO_OP"
    if name in ("REPLACE", "NO_OP"):
        return _Verb(ACCESS_OPS.index(name), 0, unit)
    if not name:
        raise failure("ERR_OP", f"{call}: operations of the program cannot be used on windows; fold after a Get")
    kind = None if leaf is None or not op._is_for(leaf) else _real_type(leaf)
    if kind is None:
        what = "a datatype of several basic types" if leaf is None else leaf.name
        raise failure("ERR_OP", f"{call}: MPI.{name} is not defined for {what} on windows")
    return _Verb(ACCESS_OPS.index(name), REAL_TYPES.index(kind), unit)


class Accesses:
    """Mixin of Win: one-sided communication."""

    __slots__ = ()
    _window: Window

    def _access(
        self,
        call: str,
        rank: int,
        target: _Target,
        verb: _Verb,
        data: memoryview,
        landing: Direct | Aside | None = None,
    ) -> Work:
        """Begin an access; it is pending in the window."""
        window = self._window
        size = len(window.units)
        if not 0 <= rank < size:
            raise failure("ERR_RANK", f"{call}: rank {rank} of a window of {size}")
        window.check_epoch(rank)
        aim = Aim(call, target.num_bytes, target.displacement, rank)
        runs = target.runs(window.units[rank])
        posted = self._posted_access(window, rank, runs, verb, data, landing)
        if posted is not None:
            work = Access([posted], window, aim)
        else:
            finish = None if landing is None else lambda: landing.finish(landing.capacity)
            work = Access(self._operations(window, rank, runs, verb, data, landing), window, aim, finish)
        window.note(rank, work)
        return work

    def _posted_access(
        self,
        window: Window,
        rank: int,
        runs: list[tuple[int, int]],
        verb: _Verb,
        data: memoryview,
        landing: Direct | Aside | None,
    ) -> Operation | None:
        """One that is short and of one run, which nobody answers before it is over; None for others."""
        if len(runs) != 1:
            return None
        number, world, _ = window.places[rank]
        address = 0 if landing is None else landing.address
        request = post_access((verb.op, verb.type, landing is not None), (number, world), runs[0], data, address)
        return Operation(request, landing) if request else None

    def _begin(self, call: str, op: Op, rank: int, target: Any, *buffers: Any) -> Access | None:
        """Begin an access of plain buffers by the short way; None, with nothing begun, where that is impossible."""
        numbers = _PLAIN.get(op._op.name) or op._op.real_by_character
        return None if numbers is None else self._begin_shortly(call, numbers, rank, target, buffers)

    def _begin_shortly(
        self, call: str, numbers: tuple[int, bytes], rank: int, target: Any, buffers: tuple[Any, Any, Any]
    ) -> Access | None:
        window = self._window
        if not (0 <= rank < len(window.places) and window.is_open_to(rank)):
            return None
        displacement = 0 if target is None else target
        begun = access_shortly(numbers, window.places[rank], displacement, call in _OF_ONE, buffers)
        if begun is None:
            return None
        number, landing, num_bytes = begun
        work = Access([Operation(number, landing)], window, Aim(call, num_bytes, displacement, rank))
        window.note(rank, work)
        return work

    def _operations(
        self,
        window: Window,
        rank: int,
        runs: list[tuple[int, int]],
        verb: _Verb,
        data: memoryview,
        landing: Direct | Aside | None,
    ) -> list[Operation]:
        """As many accesses of the lower half as it takes for so many runs."""
        operations = []
        source = NATIVE.address_of(data) if len(data) else 0
        result = 0 if landing is None else landing.address
        place = (window.members.number, window.members.ranks[rank])
        for start in range(0, len(runs), MAX_RUNS):
            some = runs[start : start + MAX_RUNS]
            num_bytes = sum(length for _, length in some)
            num_data = len(data) if len(runs) <= MAX_RUNS else num_bytes
            fields = (
                0,
                verb.op,
                verb.type,
                landing is not None,
                verb.unit,
                *place,
                source,
                num_data,
                result,
                len(some),
            )
            tail = b"".join(RUN.pack(*run) for run in some)
            operations.append(Operation(link().started(_ACCESS, fields, tail), keep=(data, landing)))
            source += num_bytes if source else 0
            result += num_bytes if result else 0
        return operations

    # The forms of an access; the target is None where the rank is PROC_NULL.

    def _put(self, call: str, origin: Any, rank: int, target: Any, op: Op) -> Work:
        begun = self._begin(call, op, rank, target, origin, None, None)
        if begun is not None:
            return begun
        if rank == k.PROC_NULL:
            return Work([])
        spec = parse(origin)
        there = _Target.of(target, spec)
        _check_fit(call, spec, there)
        return self._access(call, rank, there, _verb(call, op, there), spec.payload())

    def _get(self, call: str, result: Any, rank: int, target: Any) -> Work:
        begun = self._begin(call, _NO_OP, rank, target, None, None, result)
        if begun is not None:
            return begun
        if rank == k.PROC_NULL:
            return Work([])
        spec = parse(result)
        there = _Target.of(target, spec)
        _check_fit(call, spec, there)
        return self._access(call, rank, there, _verb(call, _NO_OP, there), _EMPTY, spec.landing())

    def _get_accumulate(self, call: str, origin: Any, result: Any, rank: int, target: Any, op: Op) -> Work:
        begun = self._begin(call, op, rank, target, None if op == _NO_OP else origin, None, result)
        if begun is not None:
            return begun
        if rank == k.PROC_NULL:
            return Work([])
        spec = parse(result)
        there = _Target.of(target, spec)
        _check_fit(call, spec, there)
        data = _EMPTY
        if op != _NO_OP:
            given = parse(origin)
            _check_fit(call, given, there)
            data = given.payload()
        return self._access(call, rank, there, _verb(call, op, there), data, spec.landing())

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._put("Put", origin, target_rank, target, _REPLACE)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        self._get("Get", origin, target_rank, target)

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = _SUM) -> None:
        self._put("Accumulate", origin, target_rank, target, op)

    def Get_accumulate(self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = _SUM) -> None:
        self._get_accumulate("Get_accumulate", origin, result, target_rank, target, op)

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        return Request._wrap(self._put("Rput", origin, target_rank, target, _REPLACE))

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        return Request._wrap(self._get("Rget", origin, target_rank, target))

    def Raccumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = _SUM) -> Request:
        return Request._wrap(self._put("Raccumulate", origin, target_rank, target, op))

    def Rget_accumulate(self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = _SUM) -> Request:
        return Request._wrap(self._get_accumulate("Rget_accumulate", origin, result, target_rank, target, op))

    # One element.

    def Fetch_and_op(self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = _SUM) -> None:
        if self._begin("Fetch_and_op", op, target_rank, target_disp, origin, None, result) is not None:
            return
        mine, there = _elements("Fetch_and_op", parse(origin), parse(result))
        if target_rank != k.PROC_NULL:
            target = _Target(int(target_disp), 1, there.datatype)
            data = _EMPTY if op == _NO_OP else mine.payload()
            self._access("Fetch_and_op", target_rank, target, _verb("Fetch_and_op", op, target), data, there.landing())

    def Compare_and_swap(self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0) -> None:
        numbers, buffers = _COMPARE_AND_SWAP, (origin, compare, result)
        if self._begin_shortly("Compare_and_swap", numbers, target_rank, target_disp, buffers) is not None:
            return
        mine, wanted, there = _elements("Compare_and_swap", parse(origin), parse(compare), parse(result))
        if target_rank != k.PROC_NULL:
            target = _Target(int(target_disp), 1, there.datatype)
            verb = _Verb(ACCESS_OPS.index("COMPARE_AND_SWAP"), 0, there.datatype._layout.size)
            data = memoryview(b"".join((mine.payload(), wanted.payload())))
            self._access("Compare_and_swap", target_rank, target, verb, data, there.landing())


def _check_fit(call: str, spec: Spec, target: _Target) -> None:
    """ERR_TRUNCATE if the data and the target's elements are not equally long."""
    if spec.num_bytes != target.num_bytes:
        raise failure("ERR_TRUNCATE", f"{call}: {spec.num_bytes} bytes at the origin, {target.num_bytes} at the target")


def _elements(call: str, *specs: Spec) -> tuple[Spec, ...]:
    """Buffers of one element each, of one predefined datatype. ValueError or ERR_TYPE if they are not."""
    for spec in specs:
        if not spec.datatype.is_predefined:
            raise failure("ERR_TYPE", f"{call}: expecting a predefined datatype")
        if spec.count != 1:
            raise ValueError(f"{call}: expecting buffers of 1 element, got {spec.count}")
        if spec.datatype != specs[0].datatype:
            raise ValueError(f"{call}: mismatch in datatypes {specs[0].datatype.name} and {spec.datatype.name}")
    return specs
