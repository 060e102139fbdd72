"""Answers of all ranks in one wave, collected one at a time in a persistent structure.

A round is a value, so each answer makes a new one. A tuple of all would be copied for each of them, which is quadratic.
They stand in blocks of about the square root of their number, of which one is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Answers(Generic[_Answer]):
    """The answers that are there, by rank."""

    blocks: tuple[tuple[_Answer | None, ...], ...]
    """In order of rank, None for a rank that has not answered; all but the last are of one length."""
    num_missing: int
    """Number of ranks that have not answered."""

    @classmethod
    def none(cls, num_ranks: int) -> Answers[_Answer]:
        """The answers before any rank has answered.

        >>> Answers.none(5).add(2, "yes").add(4, "no").silent()
        [0, 1, 3]
        """
        length = math.isqrt(num_ranks) + 1
        blocks = tuple((None,) * min(length, num_ranks - start) for start in range(0, num_ranks, length))
        return cls(blocks, num_ranks)

    def add(self, rank: int, answer: _Answer) -> Answers[_Answer]:
        """Add an answer; of two answers of one rank the later one stays."""
        at, place = divmod(rank, len(self.blocks[0]))
        block = self.blocks[at]
        changed = (*block[:place], answer, *block[place + 1 :])
        num_missing = self.num_missing - (block[place] is None)
        return Answers((*self.blocks[:at], changed, *self.blocks[at + 1 :]), num_missing)

    def given(self) -> tuple[_Answer, ...]:
        """The answers that have come, in order of rank."""
        return tuple(answer for answer in self._all() if answer is not None)

    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank, answer in enumerate(self._all()) if answer is None]

    def _all(self) -> Iterator[_Answer | None]:
        return (answer for block in self.blocks for answer in block)
