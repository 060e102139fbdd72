"""What each rank of ``programs/c/random_messages.c`` prints, from its seed alone.

The program's header draws a plan from the seed; here the same is drawn again. How a message is sent and received is no
part of it, so nothing of MPI or of Remesh is either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROGRAM: Final = tuple(
    Path(__file__).parent / "programs" / "c" / name for name in ("random_messages.c", "random_facts.c")
)
"""Its sources."""

_MASK: Final = 2**64 - 1
_KINDS: Final = ("messages", "wild", "persistent", "partitioned", "exchange", "facts")
_MAX_COUNT: Final = 20000
_MAX_MESSAGES: Final = 64


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class _Chance:
    def __init__(self, state: int) -> None:
        self._state = state

    def draw(self, below: int) -> int:
        self._state = _mix(self._state)
        return self._state % below

    def draw_count(self) -> int:
        return self.draw((2, 9, 700, 4000, _MAX_COUNT + 1)[self.draw(5)])


def expected_lines(seed: int, steps: int, size: int) -> Iterator[str]:
    """All lines of all ranks, but the answer's."""
    for number in range(steps):
        yield from _step_lines(seed, number, size)


def _step_lines(seed: int, number: int, size: int) -> Iterator[str]:
    chance = _Chance(_mix(seed) ^ _mix(number + 1))
    kind = _KINDS[chance.draw(len(_KINDS))]
    num_rounds = 1 + chance.draw(3) if kind in ("persistent", "partitioned") else 1
    num_parts = 1 + chance.draw(5) if kind == "partitioned" else 1
    num_letters = {"facts": 0, "exchange": size}.get(kind)
    if num_letters is None:
        num_letters = 1 + chance.draw(4 * size)
    shift = chance.draw(size)
    digests = [0] * size
    first_count = 0
    for tag in range(min(num_letters, _MAX_MESSAGES)):
        source, dest = chance.draw(size), chance.draw(size)
        count = chance.draw_count() // num_parts * num_parts
        if kind == "exchange":
            first_count = count if tag == 0 else first_count
            source, dest, count = tag, (tag + shift) % size, first_count
        for turn in range(num_rounds):
            digest = _digest(seed, (number << 32 | turn << 16 | tag), (source, tag, count))
            digests[dest] = (digests[dest] + digest) & _MASK
    for rank, digest in enumerate(digests):
        yield f"rank {rank} step {number} {kind} {digest:016x}"


def _digest(seed: int, which: int, letter: tuple[int, int, int]) -> int:
    source, tag, count = letter
    digest = _mix(source << 40 ^ tag << 20 ^ count)
    origin = seed ^ _mix(which)
    for k in range(count):
        digest = _mix(digest ^ _mix(origin ^ k << 1) & 0xFFFFFFFF)
    return digest
