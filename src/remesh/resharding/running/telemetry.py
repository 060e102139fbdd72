"""Timings of messages, as a run measured them, to be laid beside its plan.

Definitions. Times are seconds since the ranks agreed on the plan, on each rank's own clock; ranks leave that agreement
within one latency of each other. A giver knows when it began to send, a taker when everything was there; a *timing*
of the whole run takes the beginning from the one and the end from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from remesh.resharding.model.program import Timing


@dataclass(frozen=True, eq=False, repr=False)
class BytesByPair(Mapping[tuple[int, int], int]):
    """Bytes by (giver, taker), counted when first read: among thousands of ranks there are millions of pairs."""

    count: Callable[[], Mapping[tuple[int, int], int]]

    @cached_property
    def _counted(self) -> Mapping[tuple[int, int], int]:
        return self.count()

    def __getitem__(self, pair: tuple[int, int]) -> int:
        return self._counted[pair]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._counted)

    def __len__(self) -> int:
        return len(self._counted)

    def __repr__(self) -> str:
        return repr(dict(self._counted))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._counted),)


def merge_timings(given: Iterable[Timing], taken: Iterable[Timing]) -> tuple[Timing, ...]:
    """One timing per message, in the order in which they began.

    ``given`` and ``taken`` hold the lists of all ranks. A message of which only one end is known keeps its times.
    """
    by_message = {(t.stage, t.round, t.giver, t.taker): t for t in given}
    merged = []
    for end in taken:
        begin = by_message.pop((end.stage, end.round, end.giver, end.taker), end)
        merged.append(replace(end, start_s=begin.start_s, finish_s=max(end.finish_s, begin.start_s)))
    merged += by_message.values()
    return tuple(sorted(merged, key=lambda t: (t.start_s, t.finish_s, t.stage, t.round, t.giver)))
