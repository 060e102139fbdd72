"""What is a datatype, by brute force: a list of its values with their offsets, and its bounds.

Written from MPI 4.1, chapter 5; it knows nothing of how the library keeps datatypes. A random program is a list of
lines for ``program.c``, and what it should print.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

Value = tuple[int, int, int]
"""Offset, bytes, and bytes that are turned round in the other order of bytes."""


@dataclass(frozen=True)
class Typemap:
    """One element."""

    values: tuple[Value, ...]
    lb: int
    ub: int
    align: int
    is_bounded: bool = False  # a bound was set
    story: str = ""  # as program.c tells how it was made

    @property
    def extent(self) -> int:
        return self.ub - self.lb

    @property
    def size(self) -> int:
        return sum(size for _, size, _ in self.values)

    def bytes_of(self, count: int) -> list[int]:
        """Offsets of all bytes of so many elements, in the order of the data."""
        return [
            index * self.extent + offset + byte
            for index in range(count)
            for offset, size, _ in self.values
            for byte in range(size)
        ]


def _basic(name: str, size: int, align: int, *values: Value) -> Typemap:
    parts = values or ((0, size, align),)
    extent = -(-max(offset + bytes_ for offset, bytes_, _ in parts) // align) * align
    return Typemap(parts, 0, extent, align, story=f" MPI_{name}")


BASICS = (
    _basic("CHAR", 1, 1),
    _basic("SHORT", 2, 2),
    _basic("INT", 4, 4),
    _basic("DOUBLE", 8, 8),
    _basic("FLOAT", 4, 4),
    _basic("BYTE", 1, 1),
    _basic("SHORT_INT", 6, 4, (0, 2, 2), (4, 4, 4)),
    _basic("DOUBLE_INT", 12, 8, (0, 8, 8), (8, 4, 4)),
    _basic("C_DOUBLE_COMPLEX", 16, 8),
    _basic("LONG_LONG_INT", 8, 8),
    _basic("2INT", 8, 4, (0, 4, 4), (4, 4, 4)),
)
"""In the order of program.c."""


def placed(blocks: list[tuple[int, int, Typemap]], story: str) -> Typemap:
    """Blocks of displacement, number of elements, and what each element is."""
    # What has neither values nor bounds that were set is nothing, wherever it stands.
    filled = [block for block in blocks if block[2].values or block[2].is_bounded]
    elements = [(displacement + i * part.extent, part) for displacement, count, part in filled for i in range(count)]
    values = tuple((start + offset, size, unit) for start, part in elements for offset, size, unit in part.values)
    is_bounded = any(part.is_bounded for _, part in elements)
    edges = [(start + part.lb, start + part.ub) for start, part in elements if part.is_bounded or not is_bounded]
    lb, ub = min((low for low, _ in edges), default=0), max((high for _, high in edges), default=0)
    align = max((part.align for _, part in elements), default=1)
    return Typemap(values, lb, ub, align, is_bounded, story)


def padded(typemap: Typemap) -> Typemap:
    """As C pads a structure."""
    extent = -(-typemap.extent // typemap.align) * typemap.align
    ub = typemap.ub if typemap.is_bounded else typemap.lb + extent
    return Typemap(typemap.values, typemap.lb, ub, typemap.align, typemap.is_bounded, typemap.story)


def bounded(typemap: Typemap, lb: int, ub: int, story: str) -> Typemap:
    """The same values with other bounds."""
    return Typemap(typemap.values, lb, ub, typemap.align, True, story)


def chosen_of_array(old: Typemap, sizes: list[int], chosen: list[list[int]], order: str, story: str) -> Typemap:
    """Elements of an array whose index in each dimension is among those chosen, in the order of memory."""
    strides = [0] * len(sizes)
    step = old.extent
    dims = list(range(len(sizes)))
    for dim in reversed(dims) if order == "C" else dims:
        strides[dim] = step
        step *= sizes[dim]
    slowest_first = dims if order == "C" else dims[::-1]
    blocks = [
        (sum(index * strides[dim] for index, dim in zip(indices, slowest_first, strict=True)), 1, old)
        for indices in itertools.product(*(chosen[dim] for dim in slowest_first))
    ]
    return bounded(placed(blocks, story), 0, step, story)


def _texts(values: list[int]) -> str:
    return "".join(f" {value}" for value in values)


def _told(combiner: str, ints: list[int], addresses: list[int], types: list[Typemap]) -> str:
    return f" ({combiner}{_texts(ints)} |{_texts(addresses)} |{''.join(t.story for t in types)})"


@dataclass
class Program:
    """Lines for program.c, and what it should print."""

    random: random.Random
    least: int = 0
    """Of counts and lengths. With 1 nothing is made that MPI libraries differ in: what becomes of nothing, of
    displacements that C would not have, and of a structure that has parts with bounds that were set.
    """
    types: list[Typemap] = field(default_factory=lambda: list(BASICS))
    lines: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    overlapping: set[int] = field(default_factory=set)
    """Lines of output that MPI leaves open, since values stand in the same bytes."""
    external: set[int] = field(default_factory=set)
    """Lines of output of the external form."""

    def _old(self) -> int:
        recent = len(self.types) - 1 - int(abs(self.random.gauss(0, 3)))
        return recent if self.random.random() < 0.7 and recent >= 0 else self.random.randrange(len(self.types))

    def _count(self, end: int) -> int:
        return self.random.randrange(self.least, end)

    @property
    def _step(self) -> int:
        """Displacements in bytes are its multiples."""
        return 16 if self.least else 1

    def make(self) -> None:
        """One more datatype, of a random constructor; none if it would be too large, or empty."""
        names = ("contiguous", "vector", "hvector", "indexed", "hindexed", "indexed_block", "hindexed_block", "struct")
        name = self.random.choice((*names, "resized", "dup", "subarray", "darray"))
        number, old = len(self.types), self._old()
        arguments, typemap = getattr(self, f"_{name}")(self.types[old])
        if not self.least <= len(typemap.values) <= 400 or abs(typemap.extent) > 20000:
            return
        head = f"{name} {number}" if name == "struct" else f"{name} {number} {old}"
        self.lines.append(f"{head} {arguments}")
        self.types.append(typemap)

    def _contiguous(self, old: Typemap) -> tuple[str, Typemap]:
        count = self._count(6)
        return f"{count}", placed([(0, count, old)], _told("contiguous", [count], [], [old]))

    def _vector(self, old: Typemap) -> tuple[str, Typemap]:
        count, length, stride = self._count(5), self._count(4), self.random.randrange(-6, 8)
        blocks = [(i * stride * old.extent, length, old) for i in range(count)]
        return f"{count} {length} {stride}", placed(blocks, _told("vector", [count, length, stride], [], [old]))

    def _hvector(self, old: Typemap) -> tuple[str, Typemap]:
        count, length, stride = self._count(5), self._count(4), self.random.randrange(-50, 90) * self._step
        blocks = [(i * stride, length, old) for i in range(count)]
        return f"{count} {length} {stride}", placed(blocks, _told("hvector", [count, length], [stride], [old]))

    def _blocks(self, unit: int) -> tuple[list[int], list[int]]:
        count = self._count(6)
        lengths = [self._count(4) for _ in range(count)]
        if self.random.random() < 0.4:  # a regular row
            start, step = self.random.randrange(-9, 9) * unit, self.random.randrange(1, 9) * unit
            return [self.random.randrange(1, 4)] * count, [start + i * step for i in range(count)]
        return lengths, [self.random.randrange(-10, 20) * unit for _ in range(count)]

    def _indexed(self, old: Typemap) -> tuple[str, Typemap]:
        lengths, displacements = self._blocks(1)
        blocks = [(d * old.extent, n, old) for d, n in zip(displacements, lengths, strict=True)]
        ints = [len(lengths), *lengths, *displacements]
        return _texts(ints), placed(blocks, _told("indexed", ints, [], [old]))

    def _hindexed(self, old: Typemap) -> tuple[str, Typemap]:
        lengths, displacements = self._blocks(3 * self._step)
        blocks = [(d, n, old) for d, n in zip(displacements, lengths, strict=True)]
        ints = [len(lengths), *lengths]
        return _texts([*ints, *displacements]), placed(blocks, _told("hindexed", ints, displacements, [old]))

    def _indexed_block(self, old: Typemap) -> tuple[str, Typemap]:
        length, displacements = self._count(4), self._blocks(1)[1]
        blocks = [(d * old.extent, length, old) for d in displacements]
        ints = [len(displacements), length, *displacements]
        return _texts(ints), placed(blocks, _told("indexed_block", ints, [], [old]))

    def _hindexed_block(self, old: Typemap) -> tuple[str, Typemap]:
        length, displacements = self._count(4), self._blocks(5 * self._step)[1]
        blocks = [(d, length, old) for d in displacements]
        ints = [len(displacements), length]
        return _texts([*ints, *displacements]), placed(blocks, _told("hindexed_block", ints, displacements, [old]))

    def _struct(self, old: Typemap) -> tuple[str, Typemap]:
        lengths, displacements = self._blocks(4 * self._step)
        olds = [self._old() for _ in lengths]
        if self.least:
            olds = [2 if self.types[index].is_bounded else index for index in olds]
        parts = [self.types[index] for index in olds]
        blocks = list(zip(displacements, lengths, parts, strict=True))
        told = _told("struct", [len(lengths), *lengths], displacements, parts)
        return _texts([len(lengths), *lengths, *displacements, *olds]), padded(placed(blocks, told))

    def _resized(self, old: Typemap) -> tuple[str, Typemap]:
        lb, extent = self.random.randrange(-20, 20) * self._step, self.random.randrange(1, 90) * self._step
        return f"{lb} {extent}", bounded(old, lb, lb + extent, _told("resized", [], [lb, extent], [old]))

    def _dup(self, old: Typemap) -> tuple[str, Typemap]:
        return "", Typemap(old.values, old.lb, old.ub, old.align, old.is_bounded, _told("dup", [], [], [old]))

    def _subarray(self, old: Typemap) -> tuple[str, Typemap]:
        order = self.random.choice("CF")
        sizes = [self.random.randrange(1, 6) for _ in range(self.random.randrange(1, 4))]
        subsizes = [self.random.randrange(1, size + 1) for size in sizes]
        starts = [self.random.randrange(size - sub + 1) for size, sub in zip(sizes, subsizes, strict=True)]
        chosen = [list(range(start, start + sub)) for start, sub in zip(starts, subsizes, strict=True)]
        ints = [len(sizes), *sizes, *subsizes, *starts]
        story = _told("subarray", [*ints, _ORDER[order]], [], [old])
        return f"{_texts(ints)} {order}", chosen_of_array(old, sizes, chosen, order, story)

    def _darray(self, old: Typemap) -> tuple[str, Typemap]:
        order = self.random.choice("CF")
        ndims = self.random.randrange(1, 4)
        sizes = [self.random.randrange(1, 7) for _ in range(ndims)]
        kinds = [self.random.choice("BCN") for _ in range(ndims)]
        grid = [1 if kind == "N" else self.random.randrange(1, 4) for kind in kinds]
        num_ranks = 1
        for extent in grid:
            num_ranks *= extent
        rank = self.random.randrange(num_ranks)
        coords, left = [], rank
        for extent in reversed(grid):
            coords.insert(0, left % extent)
            left //= extent
        arguments, chosen = [], []
        for size, kind, extent, at in zip(sizes, kinds, grid, coords, strict=True):
            least = -(-size // extent) if kind == "B" else 1
            argument = self.random.choice((0, least, least + 1)) if kind != "N" else 0
            block = argument or least
            arguments.append(argument)
            chosen.append([i for i in range(size) if kind == "N" or i // block % extent == at])
        words = f"{num_ranks} {rank} {ndims}{_texts(sizes)} {' '.join(kinds)}{_texts(arguments)}{_texts(grid)} {order}"
        dargs = [argument or _DEFAULT for argument in arguments]
        ints = [num_ranks, rank, ndims, *sizes, *(_KINDS[kind] for kind in kinds), *dargs, *grid, _ORDER[order]]
        return words, chosen_of_array(old, sizes, chosen, order, _told("darray", ints, [], [old]))

    def without_external(self) -> Program:
        """The same one, which asks for nothing external."""
        kept = [number for number in range(len(self.expected)) if number not in self.external]
        lines = [line for line in self.lines if not line.startswith("external")]
        overlapping = {new for new, old in enumerate(kept) if old in self.overlapping}
        expected = [self.expected[number] for number in kept]
        return Program(self.random, self.least, self.types, lines, expected, overlapping)

    def ask(self, number: int) -> None:
        """All that can be asked of a datatype."""
        one = self.types[number]
        true_lb = min((offset for offset, _, _ in one.values), default=0)
        true_ub = max((offset + size for offset, size, _ in one.values), default=0)
        self.lines.append(f"bounds {number}")
        self.expected.append(f"{one.size} {one.lb} {one.extent} {true_lb} {true_ub - true_lb}")
        self.lines.append(f"tell {number}")
        self.expected.append(one.story)
        count = self.random.randrange(4)
        offsets = one.bytes_of(count)
        start = -min(offsets, default=0) + self.random.randrange(4)
        room = start + max(offsets, default=0) + 1 + self.random.randrange(4)
        memory = bytes((i * 7 + i // 251) & 255 for i in range(room))
        packed = bytes(memory[start + offset] for offset in offsets)
        back = bytearray(b"\xee" * room)
        for offset in offsets:
            back[start + offset] = memory[start + offset]
        for word in ("pack", "external"):
            self.lines.append(f"{word} {number} {count} {start} {room}")
            if word == "external":
                packed = _turned(packed, one, count)
                self.external |= {len(self.expected), len(self.expected) + 1}
            if len(set(offsets)) < len(offsets):
                self.overlapping.add(len(self.expected) + 1)
            self.expected += [packed.hex(), back.hex()]


def _turned(packed: bytes, one: Typemap, count: int) -> bytes:
    turned, at = b"", 0
    for _, size, unit in one.values * count:
        value = packed[at : at + size]
        at += size
        turned += b"".join(value[i : i + unit][::-1] for i in range(0, size, unit))
    return turned


_ORDER = {"C": 56, "F": 57}
_KINDS = {"B": 121, "C": 122, "N": 123}
_DEFAULT = -49767
"""Values of constants in MPICH's face."""


def random_program(seed: int, num_types: int, least: int = 0) -> Program:
    """The same one for the same seed."""
    program = Program(random.Random(seed), least)
    for _ in range(num_types):
        program.make()
    for number in range(len(program.types)):
        program.ask(number)
    for number in range(len(BASICS), len(program.types)):
        program.lines.append(f"free {number}")
    return program
