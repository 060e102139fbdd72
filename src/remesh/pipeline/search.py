"""Search for the fastest pipeline schedule that fits into memory, and of the fastest the one with least memory.

A candidate gives every stage its warm-up and its delay (`remesh.pipeline.schedules`); what it takes is simulated.

1. *Ramps.* In a steady pipeline a stage needs as many micro-batches under way as its round trip (from the start of an F
   to that of its I) has periods (the time of the busiest rank or line for one micro-batch). So warm-ups are tried that
   grow with the round trip, by several factors, and those of 1F1B and eager-1F1B; each with whole backwards, with
   delays of 0 and 1, and with the delay that lets every stage keep as much as the fullest. What does not fit under the
   limit is cut down: delay first, then warm-up.
2. *Climb.* From the best, then the next best, single stages, or two neighbours at once, are changed while that saves
   time. It ends with the effort, or near the bound that no schedule beats (`remesh.pipeline.step_bound`).
3. *Level.* Those that take no more than ``1 + tolerance`` times the least time are cut down to fewer bytes on every
   rank, by bisection; the best of them is mended by climbing under that limit, and must take no more either.
4. *Shrink.* From what then keeps least, single stages are cut down while that stays true, fullest first.

To keep little means: first few bytes on the fullest rank, then few bytes in all, then little time. No chance is
involved: the same question has the same answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from remesh.pipeline.actions import Action
from remesh.pipeline.costs import Costs
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.peaks import Peak, compute_peaks, peak_of_row
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.player import Player
from remesh.pipeline.schedule import Schedule
from remesh.pipeline.schedules import build_row, build_schedule, eager_warmups, plain_warmups
from remesh.pipeline.step_bound import LongestPaths, StepBound, compute_bound, least_backward_s, names_of_lines

_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
_NEAR = 0.002
"""Nearer than this fraction to the bound no more time is looked for."""
_MENDABLE = 0.05
"""Further than this fraction from what is allowed, what was cut down is not mended."""
_NUM_CUT = 8
"""How many of the good candidates are cut down."""
_NUM_ACTIONS = 250_000
"""What one unit of effort simulates: about a quarter of a second."""
_STEPS = ((1, 0), (0, 1), (-1, 1), (1, -1))
"""Changes of warm-up and delay that may save time."""
_CUTS = ((0, 8), (0, 4), (0, 2), (0, 1), (4, 0), (2, 0), (1, 0), (2, -1), (1, -1), (1, 1))
"""Steps down in warm-up and delay that are tried one after the other, each as long as it is allowed."""
_LEAST_GAIN = 1e-9
"""Fraction of the step time below which a change is no gain but rounding."""


@dataclass(frozen=True, slots=True, order=True)
class Knobs:
    """What the order of one stage depends on."""

    warmup: int
    """Forwards before the first backward. Invariant: 1 to M."""
    delay: int
    """Backwards ahead of their weight gradients; -1 for whole backwards. Invariant: >= -1."""

    def __str__(self) -> str:
        return f"{self.warmup}{'' if self.delay < 0 else f'+{self.delay}'}"


Candidate = tuple[Knobs, ...]
"""The knobs of every stage."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search, with its reason."""

    schedule: Schedule
    knobs: Candidate
    step_s: float
    """Its simulated time."""
    fastest_s: float
    """The least time of all that were tried under the limit. Invariant: ``step_s <= (1 + tolerance) * fastest_s``."""
    signal_s: float
    """The time of the same schedule if transfers took no time."""
    bound: StepBound
    """What no schedule can beat, whatever it keeps."""
    peaks: tuple[Peak, ...]
    """What each rank keeps at most."""
    num_tried: int
    reason: str


def search_schedule(
    graph: StageGraph,
    costs: Costs,
    num_microbatches: int,
    *,
    limits_bytes: int | Sequence[int | None] | None = None,
    tolerance: float = 0.01,
    effort: int = 1,
) -> Found:
    """Find the schedule that keeps the fewest bytes among the fastest ones within the memory limit.

    More ``effort`` climbs longer, about a quarter of a second each: worth it for uneven costs and shared NICs.
    `PipelineError` when no schedule meets the limit: one micro-batch of some stage is more.

    >>> chain = StageGraph.chain(2)
    >>> [search_schedule(chain, Costs.uniform(chain, transfer_s=c), 32).knobs[0].warmup for c in (0.25, 1, 2)]
    [2, 3, 4]
    """
    if num_microbatches < 1:
        raise PipelineError(f"searching a schedule: expected at least 1 micro-batch, found {num_microbatches}")
    if not 0 <= tolerance < math.inf:
        raise PipelineError(f"searching a schedule: expected a tolerance >= 0, found {tolerance}")
    if effort < 1:
        raise PipelineError(f"searching a schedule: expected an effort >= 1, found {effort}")
    search = _ScheduleSearch(graph, costs, num_microbatches, _limits(limits_bytes, graph.num_stages))
    search.num_left = effort * _NUM_ACTIONS
    for candidate in search.ramps():
        search.time_s(candidate)
    near_s = search.bound.step_s * (1 + _NEAR)
    for start in sorted(search.tried, key=search.by_time):
        if search.time_s(search.fastest()) <= near_s:
            break
        search.climb(start, near_s)
    while True:
        fastest = search.fastest()
        allowed_s = search.time_s(fastest) * (1 + tolerance)
        least = search.shrink(search.level(allowed_s), allowed_s)
        # To keep less can save time too, and then less time is allowed.
        if search.time_s(search.fastest()) == search.time_s(fastest):
            return search.answer(least, fastest)


def _limits(limits_bytes: int | Sequence[int | None] | None, num_stages: int) -> list[int | None]:
    limits = [limits_bytes] * num_stages if limits_bytes is None or isinstance(limits_bytes, int) else [*limits_bytes]
    if len(limits) != num_stages:
        raise PipelineError(
            f"searching a schedule: expected a memory limit for each of {num_stages} ranks, found {len(limits)}"
        )
    return limits


class _ScheduleSearch:
    """What was tried so far, and the moves from candidate to candidate."""

    def __init__(
        self, graph: StageGraph, costs: Costs, num_microbatches: int, limits_bytes: Sequence[int | None]
    ) -> None:
        self._graph = graph
        self._costs = costs
        self._num = num_microbatches
        self._limits = limits_bytes
        self.bound = compute_bound(graph, costs, num_microbatches)
        self._player = Player(graph, costs, range(graph.num_stages))
        self._rows: dict[tuple[int, Knobs], tuple[Action, ...]] = {}
        self._nbytes: dict[tuple[int, Knobs], int] = {}
        self.num_left = _NUM_ACTIONS
        """Simulated actions until nothing is climbed any more."""
        self.tried: dict[Candidate, float] = {}
        """Candidate to its simulated time."""
        for stage in range(graph.num_stages):
            smallest = self.nbytes_of(stage, Knobs(1, -1))
            limit = limits_bytes[stage]
            if limit is not None and smallest > limit:
                raise PipelineError(
                    f"searching a schedule: rank {stage} keeps {smallest} bytes for a single micro-batch, its limit is "
                    f"{limit} bytes, so no schedule fits; use smaller micro-batches, recompute activations, or cut "
                    "the model elsewhere"
                )

    def row(self, stage: int, knobs: Knobs) -> tuple[Action, ...]:
        """The row of a stage, built once."""
        key = stage, knobs
        if key not in self._rows:
            delay = None if knobs.delay < 0 else knobs.delay
            self._rows[key] = build_row(stage, self._num, knobs.warmup, delay)
        return self._rows[key]

    def nbytes_of(self, stage: int, knobs: Knobs) -> int:
        """The most bytes that a stage keeps."""
        key = stage, knobs
        if key not in self._nbytes:
            self._nbytes[key] = peak_of_row(self.row(stage, knobs), self._costs).nbytes
        return self._nbytes[key]

    def time_s(self, candidate: Candidate) -> float:
        """The simulated time of a step, computed once; infinite for what has a deadlock."""
        if candidate not in self.tried:
            rows = [self.row(stage, knobs) for stage, knobs in enumerate(candidate)]
            self.num_left -= sum(map(len, rows))
            played = self._player.play(rows, self._num)
            is_done = all(len(ends) == len(row) for ends, row in zip(played.ends, rows, strict=True))
            self.tried[candidate] = played.step_s if is_done else math.inf
        return self.tried[candidate]

    def fastest(self) -> Candidate:
        """The best by time of all that were tried."""
        return min(self.tried, key=self.by_time)

    def by_time(self, candidate: Candidate) -> tuple[float, int, int, Candidate]:
        """Order by time, then by what is kept."""
        return (self.time_s(candidate), *self.kept_bytes(candidate), candidate)

    def by_memory(self, candidate: Candidate) -> tuple[int, int, float, Candidate]:
        """Order by what is kept, then by time."""
        return (*self.kept_bytes(candidate), self.time_s(candidate), candidate)

    def kept_bytes(self, candidate: Candidate) -> tuple[int, int]:
        """The bytes kept on the fullest rank, and on all ranks."""
        nbytes = [self.nbytes_of(stage, knobs) for stage, knobs in enumerate(candidate)]
        return max(nbytes), sum(nbytes)

    def fit(self, stage: int, knobs: Knobs, most_bytes: float = math.inf) -> Knobs:
        """The knobs, cut down to what is possible, allowed, and keeps no more than this: delay first, then warm-up."""
        warmup = min(max(knobs.warmup, 1), self._num)
        knobs = Knobs(warmup, min(max(knobs.delay, -1), self._num - 1))
        limit = self._limits[stage]
        most_bytes = most_bytes if limit is None else min(most_bytes, limit)
        while self.nbytes_of(stage, knobs) > most_bytes:
            if knobs.delay > 0:
                knobs = Knobs(knobs.warmup, knobs.delay - 1)
            elif knobs.warmup > 1:
                knobs = Knobs(knobs.warmup - 1, knobs.delay)
            else:
                return Knobs(1, -1)
        return knobs

    def fit_all(self, candidate: Sequence[Knobs], most_bytes: float = math.inf) -> Candidate:
        """All knobs cut down, and no stage warms up longer than one that it takes values of: that is a deadlock."""
        fitted = [self.fit(stage, knobs, most_bytes) for stage, knobs in enumerate(candidate)]
        for edge in sorted(self._graph.edges, key=lambda each: each.source):
            longest = fitted[edge.source].warmup
            fitted[edge.target] = replace(fitted[edge.target], warmup=min(fitted[edge.target].warmup, longest))
        return tuple(fitted)

    def ramps(self) -> Iterator[Candidate]:
        """The candidates to begin with."""
        for warmups in self._warmups():
            most = max(warmups)
            for delays in ([-1] * len(warmups), [0] * len(warmups), [1] * len(warmups), [most - w for w in warmups]):
                yield self.fit_all([Knobs(*each) for each in zip(warmups, delays, strict=True)])

    def _warmups(self) -> Iterator[list[int]]:
        yield plain_warmups(self._graph.num_stages, self._num)
        yield eager_warmups(self._graph.num_stages, self._num)
        round_trips = LongestPaths(self._graph, self._costs).round_trip_s
        period_s = self._period_s()
        for factor in _FACTORS:
            # Rounding must not make two micro-batches of one.
            needed = [factor * (each - round_trips[-1]) / period_s if period_s else 0.0 for each in round_trips]
            yield [1 + math.ceil(each - _LEAST_GAIN) for each in needed]

    def _period_s(self) -> float:
        """The time of the busiest rank or line for one micro-batch."""
        ranks = [cost.forward_s + least_backward_s(cost) for cost in self._costs.stages]
        lines: dict[str, float] = {}
        for edge, cost in zip(self._graph.edges, self._costs.edges, strict=True):
            for giver, taker, time_s in (
                (edge.source, edge.target, cost.forward_s),
                (edge.target, edge.source, cost.backward_s),
            ):
                for line in names_of_lines(giver, taker, self._costs.lines):
                    lines[line] = lines.get(line, 0.0) + time_s
        return max([*ranks, *lines.values()])

    def climb(self, candidate: Candidate, enough_s: float, most_bytes: float = math.inf) -> Candidate:
        """Change single stages, or two neighbours at once, while that saves time, until it is enough."""
        improved = True
        while improved and self.num_left > 0 and self.time_s(candidate) > enough_s:
            improved = False
            for stages in (*((n,) for n in range(len(candidate))), *itertools.pairwise(range(len(candidate)))):
                if self.num_left <= 0 or (improved and len(stages) == 2):
                    break
                neighbours = self._neighbours(candidate, stages, most_bytes)
                best = min(neighbours, key=self.by_time, default=candidate)
                if self.time_s(best) < self.time_s(candidate) * (1 - _LEAST_GAIN):
                    candidate, improved = best, True
        return candidate

    def _neighbours(self, candidate: Candidate, stages: Sequence[int], most_bytes: float) -> Iterator[Candidate]:
        for steps in itertools.product(_STEPS, repeat=len(stages)):
            changed = candidate
            for stage, (warmup, delay) in zip(stages, steps, strict=True):
                old = candidate[stage]
                changed = _with(
                    changed, stage, self.fit(stage, Knobs(old.warmup + warmup, old.delay + delay), most_bytes)
                )
            if changed != candidate:
                yield changed

    def level(self, allowed_s: float) -> Candidate:
        """What keeps least on its fullest rank, of all tried, and of them cut down and mended, that take no longer."""
        good = sorted((each for each, time_s in self.tried.items() if time_s <= allowed_s), key=self.by_memory)
        least, sources = good[0], good[:_NUM_CUT]
        levels = sorted({self.nbytes_of(n, knobs) for each in sources for n, knobs in enumerate(each)})
        levels = [each for each in levels if each < self.kept_bytes(least)[0]]
        while levels:
            at = len(levels) // 2
            best = self._cut(sources, levels[at], allowed_s)
            if self.time_s(best) <= allowed_s:
                least, levels = best, levels[:at]
            else:
                levels = levels[at + 1 :]
        return least

    def _cut(self, sources: Sequence[Candidate], most_bytes: float, allowed_s: float) -> Candidate:
        """The fastest of these that is left when no rank may keep more, mended if that looks possible."""
        best = min((self.fit_all(each, most_bytes) for each in sources), key=self.by_time)
        is_near = self.time_s(best) <= allowed_s * (1 + _MENDABLE)
        return self.climb(best, allowed_s, most_bytes) if is_near else best

    def shrink(self, candidate: Candidate, allowed_s: float) -> Candidate:
        """Cut down single stages, fullest first, in ever smaller steps, while the time stays allowed."""
        before = None
        while candidate != before:
            before = candidate
            tighter = self._cut([candidate], self.kept_bytes(candidate)[0] - 1, allowed_s)
            if self.kept_bytes(tighter) < self.kept_bytes(candidate) and self.time_s(tighter) <= allowed_s:
                candidate = tighter
            for stage in sorted(range(len(candidate)), key=lambda n: (-self.nbytes_of(n, before[n]), n)):
                candidate = self._shrink_stage(candidate, stage, allowed_s)
        return candidate

    def _shrink_stage(self, candidate: Candidate, stage: int, allowed_s: float) -> Candidate:
        for warmup, delay in _CUTS:
            while True:
                old = candidate[stage]
                knobs = self.fit(stage, Knobs(old.warmup - warmup, old.delay - delay))
                smaller = _with(candidate, stage, knobs)
                if self.nbytes_of(stage, knobs) >= self.nbytes_of(stage, old) or self.time_s(smaller) > allowed_s:
                    break
                candidate = smaller
        return candidate

    def answer(self, candidate: Candidate, fastest: Candidate) -> Found:
        """The chosen candidate with its reason."""
        schedule = build_schedule(
            "searched",
            self._num,
            [knobs.warmup for knobs in candidate],
            [None if knobs.delay < 0 else knobs.delay for knobs in candidate],
        )
        step_s, fastest_s = self.time_s(candidate), self.time_s(fastest)
        player = Player(self._graph, self._costs.without_transfers(), range(self._graph.num_stages))
        signal_s = player.play(schedule.rows, self._num).step_s
        kept, of_fastest = self.kept_bytes(candidate)[0], self.kept_bytes(fastest)[0]
        chosen = (
            "nothing as fast keeps less"
            if candidate == fastest
            else f"{_listed(candidate)} takes {step_s:.6g} and keeps {kept}"
        )
        reason = (
            f"of {len(self.tried)} candidates the fastest, {_listed(fastest)}, takes {fastest_s:.6g} and keeps "
            f"{of_fastest} bytes on its fullest rank; {chosen}; no schedule beats {self.bound.step_s:.6g}, "
            f"{self.bound.reason}"
        )
        peaks = compute_peaks(schedule, self._costs)
        return Found(schedule, candidate, step_s, fastest_s, signal_s, self.bound, peaks, len(self.tried), reason)


def _with(candidate: Candidate, stage: int, knobs: Knobs) -> Candidate:
    return (*candidate[:stage], knobs, *candidate[stage + 1 :])


def _listed(candidate: Candidate) -> str:
    return "warm-ups " + ", ".join(map(str, candidate))
