"""Order of sendings by stages of the traffic: priorities by which no host waits while it has work.

Definitions. The *progress* of a chunk is how much of its route comes before it, from 0 to 1. Its *lag* on a hop is the
number of hosts that pass it on before. Time is divided into *periods*, as many as the finest route has chunks.

Algorithm (a pipeline of periods):

1. A chunk that is due in period ``p`` crosses its first hop in period ``p``, its second in ``p + 1``, and so on: what a
   relay sends in a period came in the one before, so inside a period hops need no order. In the steady state every
   period carries the same traffic from host to host.
2. Decompose that traffic into stages (`decompose`). They fix when in a period a pair of hosts is served; no host waits
   while it is busiest, and the whole takes as many periods more as the longest lag.
3. Within the time of a pair, chunks go one after the other. What stays inside a host follows what brought it.

With more than a few hundred pairs of hosts, stages are cyclic shifts instead: host number ``i`` is served to number
``i + r`` in stage ``r``. For traffic that is even between all pairs that is the same; otherwise only nearly.

A host with several NICs, or faster ones than others, counts as several *lines*, with its traffic dealt out evenly.

*Stages* (preemptive open shop). Entry ``(a, b)`` of a traffic matrix is what line ``a`` must send to line ``b``. In a
stage every line sends to at most one other and takes from at most one, all for the same time. ``D`` is the largest sum
of a row or a column: nothing can be done before ``D``. Stages that together last exactly ``D``:

1. Fill the matrix up until every row and every column adds up to ``D``: idle time on the diagonals, and the transposed
   matrix in the fourth quarter.

        M              diag(D - row sums)
        diag(D - column sums)         M^T

2. A matrix with equal sums has a perfect matching on its entries that are not 0 (Birkhoff). Let it run for as long as
   its smallest entry lasts, subtract, and repair the matching where an entry is used up (augmenting paths).

Every stage uses up an entry, so there are at most twice as many as there are entries and lines. All numbers are
integers, so sums stay equal.

Sources: Gonzalez and Sahni, "Open shop scheduling to minimize finish time" (1976).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remesh.resharding.model.network import Network

_MAX_PAIRS = 256
"""Up to this many pairs of hosts the stages are computed exactly."""

_MAX_LINES = 8
_MAX_LANES = 8

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sending:
    """One chunk from one rank to another."""

    giver: int
    taker: int
    chunk: int
    """Number of the chunk in the plan."""
    nbytes: int
    after: int
    """Number of the sending by which the giver got the chunk; -1 when it gives from its own memory."""


@dataclass(frozen=True, slots=True)
class HostLanes:
    """How many messages pass through the NICs of each host at the same time."""

    host_of: Mapping[int, str]
    """Host of every rank."""
    num_lanes: Mapping[str, int] = field(default_factory=dict)
    """Lanes of every host that has more than one. Invariant: >= 2."""


def lanes_of(host_of: Mapping[int, str], network: Network | None = None) -> HostLanes:
    """One lane for each NIC of a host."""
    if network is None:
        return HostLanes(host_of)
    nics = {host: network.hosts[host].num_nics for host in sorted(set(host_of.values()))}
    return HostLanes(host_of, {host: min(count, _MAX_LANES) for host, count in nics.items() if count > 1})


def lines_of(host_of: Mapping[int, str], network: Network | None = None) -> HostLanes:
    """A lane for each line of a host: what its NICs carry together, in multiples of the slowest NIC of all."""
    hosts = sorted(set(host_of.values()))
    if network is None or not hosts:
        return HostLanes(host_of)
    slowest = min(network.hosts[host].rate_bytes_per_s for host in hosts)
    count = {host: round(network.hosts[host].total_rate_bytes_per_s / slowest) for host in hosts}
    return HostLanes(host_of, {host: min(lines, _MAX_LINES) for host, lines in count.items() if lines > 1})


def compute_order(
    sendings: Sequence[Sending], progress: Sequence[float], num_periods: int, lines: HostLanes
) -> list[int]:
    """Numbers of the sendings by priority; each comes after the one that informs its giver.

    ``progress[chunk]`` is at least 0 and below 1. ``lines`` are those of `lines_of`. The same on every rank.
    """
    host_of = lines.host_of
    pairs = [(host_of[sending.giver], host_of[sending.taker]) for sending in sendings]
    traffic: dict[Pair, int] = {}
    for sending, pair in zip(sendings, pairs, strict=True):
        if pair[0] != pair[1]:
            traffic[pair] = traffic.get(pair, 0) + sending.nbytes
    period = _periods(sendings, pairs, progress, num_periods)
    in_period: dict[tuple[Pair, int], int] = {}
    for number, (sending, pair) in enumerate(zip(sendings, pairs, strict=True)):
        in_period[pair, period[number]] = in_period.get((pair, period[number]), 0) + sending.nbytes
    times = _stage_times(traffic, lines.num_lanes)
    served: dict[tuple[Pair, int], int] = {}
    when = [0.0] * len(sendings)
    for number, (sending, pair) in enumerate(zip(sendings, pairs, strict=True)):
        if pair[0] == pair[1]:
            when[number] = when[sending.after] if sending.after >= 0 else float(period[number])
            continue
        bucket = (pair, period[number])
        done = served.get(bucket, 0)
        served[bucket] = done + sending.nbytes
        # The middle of the message: its first byte alone may fall a hair before the end of a stage.
        share = (done + sending.nbytes / 2) / max(in_period[bucket], traffic[pair] / num_periods)
        when[number] = period[number] + times[pair].at(share)
    # A stable sort: what follows its parent at the same time stays behind it.
    return sorted(range(len(sendings)), key=when.__getitem__)


def _periods(
    sendings: Sequence[Sending], pairs: Sequence[Pair], progress: Sequence[float], num_periods: int
) -> list[int]:
    # In which period the chunk leaves its first giver, and how many hosts it crossed to since.
    first = [0] * len(sendings)
    lag = [0] * len(sendings)
    for number, sending in enumerate(sendings):
        if sending.after < 0:
            first[number] = int(progress[sending.chunk] * num_periods + 1e-9)
        else:
            giver, taker = pairs[sending.after]
            first[number] = first[sending.after]
            lag[number] = lag[sending.after] + (giver != taker)
    return [start + hosts for start, hosts in zip(first, lag, strict=True)]


@dataclass(frozen=True, slots=True)
class _Times:
    """The times in a period at which a pair of hosts is served."""

    shares: tuple[float, ...]
    """Share of the pair's traffic before each stretch, ascending from 0."""
    starts: tuple[float, ...]
    """Where each stretch begins in the period. Invariant: 0 <= start < 1, ascending."""
    speeds: tuple[float, ...]
    """Time by share inside each stretch."""

    def at(self, share: float) -> float:
        """The time, as a fraction below 1, at which this share of the traffic has been served."""
        stretch = bisect_right(self.shares, share) - 1
        return min(self.starts[stretch] + (share - self.shares[stretch]) * self.speeds[stretch], 1 - 1e-9)


def _stage_times(traffic: Mapping[Pair, int], num_lines: Mapping[str, int]) -> dict[Pair, _Times]:
    if len(traffic) > _MAX_PAIRS:
        number_of = {host: number for number, host in enumerate(sorted({host for pair in traffic for host in pair}))}
        count = len(number_of)
        return {
            (a, b): _Times((0.0,), ((number_of[b] - number_of[a]) % count / count,), (1 / count,)) for a, b in traffic
        }
    dealt = _deal_out(traffic, num_lines)
    stages = decompose({pair: amount for pair, (_, amount) in dealt.items()})
    total = max((stage.start + stage.length for stage in stages), default=1)
    stretches: dict[Pair, list[tuple[int, int]]] = {}
    for stage in stages:
        for line in stage.pairs:
            stretches.setdefault(dealt[line][0], []).append((stage.start, stage.length))
    return {pair: _times_of(found, total) for pair, found in stretches.items()}


def _times_of(stretches: Sequence[tuple[int, int]], total: int) -> _Times:
    carried = sum(length for _, length in stretches)
    shares, starts, speeds = [], [], []
    done = 0
    for start, length in sorted(stretches):
        shares.append(done / carried)
        starts.append(start / total)
        speeds.append(carried / total)
        done += length
    return _Times(tuple(shares), tuple(starts), tuple(speeds))


def _deal_out(traffic: Mapping[Pair, int], num_lines: Mapping[str, int]) -> dict[tuple[int, int], tuple[Pair, int]]:
    """Traffic from line to line, with the pair of hosts that it belongs to; lines are numbered for each direction."""
    out, into = _Dealer(num_lines), _Dealer(num_lines)
    for (a, b), nbytes in traffic.items():
        out.expect(a, nbytes)
        into.expect(b, nbytes)
    dealt: dict[tuple[int, int], tuple[Pair, int]] = {}
    for (a, b), nbytes in sorted(traffic.items()):
        left = nbytes
        while left:
            amount = min(left, out.room(a), into.room(b))
            line = (out.take(a, amount), into.take(b, amount))
            before = dealt[line][1] if line in dealt else 0
            dealt[line] = ((a, b), before + amount)
            left -= amount
    return dealt


class _Dealer:
    """Deals the traffic of each host to its lines, one after the other, in equal shares."""

    def __init__(self, num_lines: Mapping[str, int]) -> None:
        self._num_lines = num_lines
        self._total: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._first: dict[str, int] = {}

    def expect(self, host: str, nbytes: int) -> None:
        if host not in self._first:
            self._first[host] = sum(self._num_lines.get(other, 1) for other in self._first)
        self._total[host] = self._total.get(host, 0) + nbytes

    def room(self, host: str) -> int:
        """Bytes until the line that is being filled is full."""
        share = self._share(host)
        return share - self._done.get(host, 0) % share

    def take(self, host: str, nbytes: int) -> int:
        """Number of the line that takes these bytes, at most its room."""
        done = self._done.get(host, 0)
        self._done[host] = done + nbytes
        return self._first[host] + done // self._share(host)

    def _share(self, host: str) -> int:
        return -(-self._total[host] // self._num_lines.get(host, 1))


@dataclass(frozen=True, slots=True)
class TrafficStage:
    """What is sent during one stretch of time."""

    start: int
    """Sum of the lengths of all earlier stages."""
    length: int
    """Invariant: > 0."""
    pairs: tuple[tuple[int, int], ...]
    """Pairs of sender and receiver. Invariant: no line twice on the same side."""


def decompose(traffic: Mapping[tuple[int, int], int]) -> list[TrafficStage]:
    """Stages that carry exactly this traffic (amounts > 0, by sender and taker) in the least time.

    >>> [(stage.length, stage.pairs) for stage in decompose({(0, 2): 2, (0, 3): 1, (1, 2): 1})]
    [(2, ((0, 2),)), (1, ((0, 3), (1, 2)))]
    """
    senders = sorted({giver for giver, _ in traffic})
    takers = sorted({taker for _, taker in traffic})
    entries = _fill_up(traffic, {a: n for n, a in enumerate(senders)}, {b: n for n, b in enumerate(takers)})
    left = sum(entries[0].values()) if entries else 0
    row_of = [-1] * len(entries)
    column_of = [-1] * len(entries)
    stages: list[TrafficStage] = []
    now = 0
    while left:
        for row in range(len(entries)):
            if column_of[row] < 0:
                _augment(row, entries, row_of, column_of)
        length = min(entries[row][column] for row, column in enumerate(column_of))
        real = [(row, column_of[row]) for row in range(len(senders)) if column_of[row] < len(takers)]
        if real:
            stages.append(TrafficStage(now, length, tuple((senders[row], takers[column]) for row, column in real)))
        now += length
        left -= length
        for row, column in enumerate(column_of):
            entries[row][column] -= length
            if not entries[row][column]:
                del entries[row][column]
                row_of[column] = column_of[row] = -1
    return stages


def _fill_up(
    traffic: Mapping[tuple[int, int], int], row_at: Mapping[int, int], column_at: Mapping[int, int]
) -> list[dict[int, int]]:
    """Rows of the filled matrix, as columns and what is in them; every row and column adds up to the same."""
    num_rows, num_columns = len(row_at), len(column_at)
    entries: list[dict[int, int]] = [{} for _ in range(num_rows + num_columns)]
    row_sums, column_sums = [0] * num_rows, [0] * num_columns
    for (giver, taker), amount in sorted(traffic.items()):
        row, column = row_at[giver], column_at[taker]
        entries[row][column] = amount
        entries[num_rows + column][num_columns + row] = amount
        row_sums[row] += amount
        column_sums[column] += amount
    total = max([*row_sums, *column_sums], default=0)
    for row, amount in enumerate(row_sums):
        if amount < total:
            entries[row][num_columns + row] = total - amount
    for column, amount in enumerate(column_sums):
        if amount < total:
            entries[num_rows + column][column] = total - amount
    return entries


def _augment(start: int, entries: list[dict[int, int]], row_of: list[int], column_of: list[int]) -> None:
    """Match one more row, by a shortest path of changes."""
    came_from: dict[int, int] = {}
    rows = [start]
    for row in rows:
        for column in entries[row]:
            if column in came_from:
                continue
            came_from[column] = row
            if row_of[column] < 0:
                _flip(column, came_from, row_of, column_of)
                return
            rows.append(row_of[column])
    raise AssertionError("equal sums always leave a perfect matching")


def _flip(column: int, came_from: Mapping[int, int], row_of: list[int], column_of: list[int]) -> None:
    while column >= 0:
        row = came_from[column]
        before = column_of[row]
        row_of[column], column_of[row] = row, column
        column = before
