"""Is this a plan, if its messages are flows? The check of `check`, done on the rows instead of the messages.

What holds afterwards is what holds of every plan. It is more than has to hold: chunks of a plan of flows never share an
element, and neither do copies.

1. Columns fit together; every number is in its range; rank sets are ascending, and no giver of a chunk takes it.
2. *Rounds.* Hops out of one host have distinct colours, and so have hops into one. By the rules of
   `remesh.resharding.schedule.flows` two messages of one round then belong to one hop only if they belong to one chunk,
   and a chunk crosses a hop once, so in a round a rank gives at most one message and takes at most one.
3. *Order.* A hop is out of a host that gives from its own memory, or that an earlier hop of the flow has reached: its
   lag is one more, so its round is later.
4. *Givers.* Every rank that may give a chunk holds each of its parts. Ranks that keep the same boxes are asked once.
5. *Takers.* A flow reaches exactly the hosts of the takers of its chunks, each once; so a chunk comes to each of its
   takers once. Parts lie inside what the takers want, no two chunks share an element, and for each rank the sizes add
   up to all that it wants and anybody holds.

Like `check` it knows nothing of bounds and routes. Tensors whose layouts are one object are looked at together: a model
has thousands of tensors and a few layouts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from remesh.foundation.errors import PlanError
from remesh.layout import Box, Layout
from remesh.layout.box_array import BoxArray, find_pairs, is_disjoint
from remesh.resharding.model.program import Copy
from remesh.resharding.model.slices import IntArray, distinct
from remesh.resharding.model.tasks import TensorMove
from remesh.resharding.planning.sides import DOING, Sides, num_lost
from remesh.resharding.schedule.flows import OWNED, Flows
from remesh.resharding.schedule.parts import PartRows


def check_flows(moves: Sequence[TensorMove], flows: Flows, copies: Sequence[Copy], sides: Sides) -> None:
    """Raise `PlanError` unless all that the module docstring lists holds."""
    _check_columns(flows)
    _check_sets(flows)
    _check_hops(flows)
    _check_parts(moves, flows)
    holders = _Holders(moves, flows)
    holders.check(flows.givers, "src", "gives")
    holders.check(flows.takers, "dst", "takes")
    _check_disjoint(moves, flows, copies)
    _check_totals(moves, flows, copies, sides)


def _refuse(found: str) -> NoReturn:
    raise PlanError(f"{DOING}: {found}; the plan is damaged, plan again")


def _check_columns(flows: Flows) -> None:
    num_chunks, num_flows, num_hops = len(flows.givers), len(flows.first_chunk) - 1, len(flows.hop_giver)
    for what, ends, count, total in (
        ("parts of chunks", flows.chunks.first_part, num_chunks, len(flows.chunks.parts)),
        ("chunks of flows", flows.first_chunk, num_flows, num_chunks),
        ("hops of flows", flows.first_hop, num_flows, num_hops),
    ):
        if len(ends) != count + 1 or not len(ends) or ends[0] != 0 or ends[-1] != total or (np.diff(ends) < 1).any():
            _refuse(f"the {what} are counted as {ends[-1] if len(ends) else 0}, expected {total} in {count} runs")
    num_sets, num_hosts = len(flows.rank_sets), len(flows.hosts)
    for what, column, length, limit in (
        ("givers", flows.givers, num_chunks, num_sets),
        ("takers", flows.takers, num_chunks, num_sets),
        ("hosts that send", flows.hop_giver, num_hops, num_hosts),
        ("hosts that take", flows.hop_taker, num_hops, num_hosts),
        ("colours", flows.hop_colour, num_hops, num_hops),
    ):
        if len(column) != length or (length and (column.min() < 0 or column.max() >= limit)):
            _refuse(f"there are {len(column)} {what}, expected {length} numbers from 0 to {limit - 1}")
    if flows.hosts != tuple(sorted(set(flows.host_of.values()))):
        _refuse(f"flows know {len(flows.hosts)} hosts, expected those of the plan in their order")


def _check_sets(flows: Flows) -> None:
    for ranks in flows.rank_sets:
        if not ranks or any(a >= b for a, b in itertools.pairwise(ranks)) or not flows.host_of.keys() >= set(ranks):
            _refuse(f"a set of {len(ranks)} ranks is empty, or not ascending, or has a rank without a host")
    giving: dict[int, list[int]] = {}
    for number in distinct(flows.givers, len(flows.rank_sets))[0].tolist():
        for rank in flows.rank_sets[number]:
            giving.setdefault(rank, []).append(number)
    base = len(flows.rank_sets)
    clashing = {
        givers * base + takers
        for takers in distinct(flows.takers, base)[0].tolist()
        for rank in flows.rank_sets[takers]
        for givers in giving.get(rank, ())
    }
    if clashing and np.isin(flows.givers * base + flows.takers, sorted(clashing)).any():
        _refuse("a rank takes a chunk that it holds, expected that it copies it")


def _check_hops(flows: Flows) -> None:
    width = len(flows.hosts)
    for what, side in (("out of", flows.hop_giver), ("into", flows.hop_taker)):
        if not _are_distinct(side * (flows.num_colours + 1) + flows.hop_colour):
            _refuse(f"two hops {what} one host have the same colour, expected at most one message in a round")
    if not _are_distinct(flows.flow_of_hop * width + flows.hop_taker):
        _refuse("a flow has two hops into one host, expected each host once")
    if (flows.lag >= max(len(flows.lag), 1)).any():
        _refuse("hops of a flow go round in a ring, expected that they begin at an owner")
    # Of a host set only its number matters from here on.
    number_of: dict[tuple[int, ...], int] = {}
    place = {host: number for number, host in enumerate(flows.hosts)}
    hosts_of_set = [tuple(sorted({place[flows.host_of[rank]] for rank in ranks})) for ranks in flows.rank_sets]
    numbers = np.array([number_of.setdefault(hosts, len(number_of)) for hosts in hosts_of_set], dtype=np.int64)
    by_flow = np.lexsort((flows.hop_taker, flows.flow_of_hop))
    reached, ends = flows.hop_taker[by_flow].tolist(), flows.first_hop.tolist()
    expected = np.array([number_of.get(tuple(reached[a:b]), -1) for a, b in itertools.pairwise(ends)], dtype=np.int64)
    if (numbers[flows.takers] != expected[flows.flow_of_chunk]).any():
        _refuse("a flow does not reach the hosts on which its chunks are wanted, each once")
    _check_owners(flows, numbers, list(number_of))


def _check_owners(flows: Flows, numbers: IntArray, host_sets: Sequence[tuple[int, ...]]) -> None:
    """Hops that no other comes before are out of hosts on which every chunk of their flow has a giver."""
    width = len(flows.hosts)
    owns = np.zeros((len(host_sets), width), dtype=bool)
    for number, hosts in enumerate(host_sets):
        owns[number, list(hosts)] = True
    pairs, _ = distinct(
        flows.flow_of_chunk * len(host_sets) + numbers[flows.givers], len(flows.num_chunks) * len(host_sets)
    )
    flow, owners = np.divmod(pairs, max(len(host_sets), 1))
    roots = np.flatnonzero(flows.before == OWNED)
    of_flow = np.searchsorted(flows.flow_of_hop[roots], np.arange(len(flows.num_chunks) + 1))
    counts = np.diff(of_flow)[flow]
    rows = np.repeat(np.arange(len(flow)), counts)
    members = np.arange(len(rows)) + np.repeat(of_flow[flow] - (np.cumsum(counts) - counts), counts)
    if not owns[owners[rows], flows.hop_giver[roots[members]]].all():
        _refuse("a hop is out of a host that neither holds the chunk nor took it before")


def _are_distinct(keys: IntArray) -> bool:
    if not len(keys):
        return True
    limit = int(keys.max()) + 1
    return len(distinct(keys, limit)[0]) == len(keys)


def _check_parts(moves: Sequence[TensorMove], flows: Flows) -> None:
    parts = flows.chunks.parts
    if parts.ndims != tuple(move.src.ndim for move in moves):
        _refuse(f"its parts are of {len(parts.ndims)} tensors, expected {len(moves)} with as many dims")
    width = max(parts.ndims, default=0)
    for what, column in (("start", parts.starts), ("stop", parts.stops)):
        if column.shape != (len(parts), width):
            _refuse(f"the {what}s of its parts have shape {column.shape}, expected {(len(parts), width)}")
    if len(parts) and (parts.tensor.min() < 0 or parts.tensor.max() >= len(moves)):
        _refuse(f"a part belongs to tensor number {parts.tensor.max()}, expected 0 to {len(moves) - 1}")
    bounds = np.array([(*m.src.global_shape, *(1,) * (width - m.src.ndim)) for m in moves]).reshape(len(moves), width)
    if (parts.starts < 0).any() or (parts.starts >= parts.stops).any() or (parts.stops > bounds[parts.tensor]).any():
        _refuse("a part is empty or reaches past its tensor")
    itemsizes = np.array([move.src.itemsize_bytes for move in moves], dtype=np.int64)[parts.tensor]
    if (parts.nbytes != BoxArray(parts.starts, parts.stops).sizes * itemsizes).any():
        _refuse("a part has other bytes than its box")
    rises = np.flatnonzero(np.diff(itemsizes) > 0) + 1
    if not np.isin(rises, flows.chunks.first_part).all():
        _refuse("item sizes rise inside a chunk, expected that every part begins aligned")


def _rows_of(parts: PartRows, kinds: Sequence[int]) -> dict[int, IntArray | slice]:
    """Rows of the parts of each kind of tensor that has any, in their order; ``kinds`` says of which one each is."""
    kind_of = np.array(kinds, dtype=np.int64).take(parts.tensor)
    if not len(parts) or (kind_of == kind_of[0]).all():
        return {int(kind_of[0]): slice(None)} if len(parts) else {}
    order = np.argsort(kind_of, kind="stable")
    found, first = np.unique(kind_of[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, first[1:]), strict=True))


class _Holders:
    """Whether ranks hold, or want, the parts that they give, or take."""

    def __init__(self, moves: Sequence[TensorMove], flows: Flows) -> None:
        self._moves = moves
        self._flows = flows
        self._chunk = np.repeat(np.arange(len(flows.givers)), np.diff(flows.chunks.first_part))
        """Chunk of each part."""

    def check(self, sets: IntArray, side: str, verb: str) -> None:
        """Every rank of the set of a chunk has, for each part, one shard on this side that contains it."""
        parts = self._flows.chunks.parts
        layouts: list[Layout] = [getattr(move, side) for move in self._moves]
        by_id = {id(layout): layout for layout in layouts}
        for known, rows in _rows_of(parts, [id(layout) for layout in layouts]).items():
            layout = by_id[known]
            kinds = _Kinds(layout, self._flows.rank_sets)
            inside = kinds.contain(sets[self._chunk[rows]], parts.starts[rows], parts.stops[rows], layout.ndim)
            if not inside.all():
                row = int(np.argmin(inside)) if isinstance(rows, slice) else int(rows[int(np.argmin(inside))])
                part = parts.rows(row, row + 1)[0]
                ranks = self._flows.rank_sets[int(sets[self._chunk[row]])]
                raise PlanError(
                    f"{DOING}: of the ranks {ranks[:4]} ({len(ranks)} in all) one {verb} {part.box} of tensor "
                    f"{self._moves[part.tensor].name!r}, expected that each {'holds' if side == 'src' else 'wants'} it "
                    "in one shard; plan again"
                )


class _Kinds:
    """Ranks that keep the same boxes of a layout are of one *kind*; which kinds there are in each rank set."""

    def __init__(self, layout: Layout, rank_sets: Sequence[tuple[int, ...]]) -> None:
        self._layout = layout
        self._rank_sets = rank_sets
        self._number_of: dict[tuple[Box, ...], int] = {}
        self._kind_of: dict[int, int] = {}
        self._of_set: dict[int, list[int]] = {}
        for rank in layout.holders:
            boxes = tuple(sorted({shard.box for shard in layout.shards_of(rank) if not shard.box.is_empty}))
            self._kind_of[int(rank)] = self._number_of.setdefault(boxes, len(self._number_of))
        self._boxes: list[list[Box]] = [list(boxes) for boxes in self._number_of]
        self._most = max(map(len, self._boxes), default=0)
        width = layout.ndim
        # [kind, which of its boxes, dim]; a box that is not there contains nothing.
        self._starts = np.full((len(self._boxes) + 1, max(self._most, 1), width), np.iinfo(np.int64).max)
        self._stops = np.full(self._starts.shape, -1)
        for kind, boxes in enumerate(self._number_of):
            for at, box in enumerate(boxes):
                self._starts[kind, at] = box.start
                self._stops[kind, at] = box.stop

    def contain(self, sets: IntArray, starts: IntArray, stops: IntArray, ndim: int) -> np.ndarray:
        """Tell, for each part, whether every rank of its set has a box that contains the part."""
        used, place = distinct(sets, len(self._rank_sets))
        nobody = len(self._boxes)
        kinds = [self._kinds_of(number) for number in used.tolist()]
        inside = np.ones(len(sets), dtype=bool)
        for turn in range(max(map(len, kinds), default=0)):
            kind = np.array([each[turn % len(each)] for each in kinds], dtype=np.int64)[place]
            found = np.zeros(len(sets), dtype=bool)
            for at in range(max(self._most, 1)):
                holds = np.ones(len(sets), dtype=bool)
                for dim in range(ndim):
                    holds &= self._starts[:, at, dim].take(kind) <= starts[:, dim]
                    holds &= self._stops[:, at, dim].take(kind) >= stops[:, dim]
                if ndim == 0:
                    holds &= kind != nobody
                found |= holds
            inside &= found
        return inside

    def _kinds_of(self, rank_set: int) -> list[int]:
        """Kinds of the ranks of a set; one beyond all stands for ranks that keep nothing. Worked out once."""
        if rank_set not in self._of_set:
            nobody = len(self._boxes)
            self._of_set[rank_set] = sorted({self._kind_of.get(rank, nobody) for rank in self._rank_sets[rank_set]})
        return self._of_set[rank_set]


def _by_tensor(copies: Sequence[Copy]) -> dict[int, list[Copy]]:
    found: dict[int, list[Copy]] = {}
    for copy in copies:
        found.setdefault(copy.tensor, []).append(copy)
    return found


def _check_disjoint(moves: Sequence[TensorMove], flows: Flows, copies: Sequence[Copy]) -> None:
    parts = flows.chunks.parts
    takers = np.repeat(flows.takers, np.diff(flows.chunks.first_part))
    copied = _by_tensor(copies)
    known: set[tuple[object, ...]] = set()
    for tensor, rows in _rows_of(parts, range(len(moves))).items():
        here = copied.pop(tensor, [])
        travelling = BoxArray(parts.starts[rows], parts.stops[rows])
        # Copies of tensors with one pair of layouts share the objects of their boxes.
        taken_by = takers[rows]
        columns = (travelling.starts, travelling.stops, taken_by)
        key = (*map(_digest_of, columns), *((id(copy.box), copy.ranks) for copy in here))
        if key not in known:
            _check_apart(moves[tensor], travelling, taken_by, flows.rank_sets, here)
            known.add(key)
    for tensor, here in copied.items():
        _check_apart(moves[tensor], BoxArray.of([], moves[tensor].src.ndim), takers[:0], flows.rank_sets, here)


def _digest_of(column: IntArray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(column).data).digest()


def _check_apart(
    move: TensorMove,
    travelling: BoxArray,
    takers: IntArray,
    rank_sets: Sequence[tuple[int, ...]],
    copies: Sequence[Copy],
) -> None:
    """Check that chunks and copies share no elements, and that no rank receives what it copies locally."""
    ndim = move.src.ndim
    travelling = BoxArray(travelling.starts[:, :ndim], travelling.stops[:, :ndim])
    if len(travelling) and not is_disjoint(travelling):
        _refuse(f"two chunks share elements of tensor {move.name!r}, expected each element in one chunk")
    if not copies:
        return
    kept = BoxArray.of([copy.box for copy in copies], ndim)
    if not is_disjoint(kept):
        _refuse(f"two copies share elements of tensor {move.name!r}, expected each element once")
    for part, at in zip(*(side.tolist() for side in find_pairs(travelling, kept)), strict=True):
        twice = set(rank_sets[int(takers[part])]).intersection(copies[at].ranks)
        if twice:
            _refuse(f"rank {min(twice)} copies {copies[at].box} of tensor {move.name!r} and takes some of it as well")


def _check_totals(moves: Sequence[TensorMove], flows: Flows, copies: Sequence[Copy], sides: Sides) -> None:
    """Every rank gets as many elements as it wants and anybody holds."""
    parts = flows.chunks.parts
    base = len(flows.rank_sets)
    takers = np.repeat(flows.takers, np.diff(flows.chunks.first_part))
    keys, place = distinct(parts.tensor * base + takers, len(moves) * base)
    sizes = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sizes, place, BoxArray(parts.starts, parts.stops).sizes)
    tensors, sets = np.divmod(keys, base)
    ends = np.searchsorted(tensors, np.arange(len(moves) + 1)).tolist()
    copied = _by_tensor(copies)
    known: set[tuple[object, ...]] = set()
    for tensor, (move, low, high) in enumerate(zip(moves, ends, ends[1:], strict=False)):
        here = copied.get(tensor, [])
        what = [*((id(copy.box), copy.ranks) for copy in here), sets[low:high].tobytes(), sizes[low:high].tobytes()]
        key = (id(move.src), id(move.dst), *what)
        if key not in known:
            got: dict[int, int] = {}
            for number, size in zip(sets[low:high].tolist(), sizes[low:high].tolist(), strict=True):
                for rank in flows.rank_sets[number]:
                    got[rank] = got.get(rank, 0) + size
            for copy in here:
                for rank in copy.ranks:
                    got[rank] = got.get(rank, 0) + copy.box.size
            _check_total(move, got, sides)
            known.add(key)


def _check_total(move: TensorMove, here: dict[int, int], sides: Sides) -> None:
    wanted = sides.wanted(move.dst)
    for rank in sorted(wanted.keys() | here.keys()) if here != wanted else ():
        expected = wanted.get(rank, 0)
        if here.get(rank, 0) != expected:
            expected -= num_lost(move, rank)
        if here.get(rank, 0) != expected:
            raise PlanError(
                f"{DOING}: rank {rank} gets {here.get(rank, 0)} elements of tensor {move.name!r}, expected the "
                f"{expected} that it wants, each once and none outside; plan again"
            )
