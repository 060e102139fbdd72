"""Is this a plan, if its messages are flows? The check of `check`, done on the rows instead of the messages.

What holds afterwards is what holds of every plan. It is more than has to hold: chunks of a plan of flows never share an
element, and neither do copies.

1. Columns fit together; every number is in its range; rank sets are ascending, and no giver of a chunk takes it.
2. *Rounds.* Hops out of one host have distinct colours, and so have hops into one. By the rules of
   `remesh.reshard.schedule.flows` two messages of one round then belong to one hop only if they belong to one chunk,
   and a chunk crosses a hop once, so in a round a rank gives at most one message and takes at most one.
3. *Order.* A hop is out of a host that gives from its own memory, or that an earlier hop of the flow has reached: its
   lag is one more, so its round is later.
4. *Givers.* Every rank that may give a chunk holds each of its parts. Ranks that keep the same boxes are asked once.
5. *Takers.* A flow reaches exactly the hosts of the takers of its chunks, each once; so a chunk comes to each of its
   takers once. Parts lie inside what the takers want, no two chunks share an element, and for each rank the sizes add
   up to all that it wants and anybody holds.

Like `check` it knows nothing of bounds and routes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from remesh.errors import PlanError
from remesh.layout import Box, Layout
from remesh.layout.box_array import BoxArray, find_pairs, is_disjoint
from remesh.reshard.model.program import Copy
from remesh.reshard.model.slices import IntArray, distinct
from remesh.reshard.model.tasks import TensorMove
from remesh.reshard.planning.sides import DOING, Sides, num_lost
from remesh.reshard.schedule.flows import OWNED, Flows
from remesh.reshard.schedule.parts import PartRows


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


Rows = IntArray | slice


def _rows_by_tensor(parts: PartRows) -> dict[int, Rows]:
    """Rows of the parts of each tensor that has any."""
    if not len(parts) or (parts.tensor == parts.tensor[0]).all():
        return {int(parts.tensor[0]): slice(None)} if len(parts) else {}
    order = np.argsort(parts.tensor, kind="stable")
    found, first = np.unique(parts.tensor[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, first[1:]), strict=True))


class _Holders:
    """Whether ranks hold, or want, the parts that they give, or take."""

    def __init__(self, moves: Sequence[TensorMove], flows: Flows) -> None:
        self._moves = moves
        self._flows = flows
        self._chunk = np.repeat(np.arange(len(flows.givers)), np.diff(flows.chunks.first_part))
        """Chunk of each part."""
        self._by_tensor = _rows_by_tensor(flows.chunks.parts)
        self._kinds: dict[int, _Kinds] = {}

    def check(self, sets: IntArray, side: str, verb: str) -> None:
        """Every rank of the set of a chunk has, for each part, one shard on this side that contains it."""
        parts = self._flows.chunks.parts
        for tensor, rows in self._by_tensor.items():
            layout: Layout = getattr(self._moves[tensor], side)
            if id(layout) not in self._kinds:
                self._kinds[id(layout)] = _Kinds(layout, self._flows.rank_sets)
            kinds = self._kinds[id(layout)]
            of_part = sets[self._chunk[rows]]
            inside = kinds.contain(of_part, parts.starts[rows], parts.stops[rows], parts.ndims[tensor])
            if not inside.all():
                row = int(np.argmin(inside)) if isinstance(rows, slice) else int(rows[int(np.argmin(inside))])
                part = parts.rows(row, row + 1)[0]
                ranks = self._flows.rank_sets[int(sets[self._chunk[row]])]
                raise PlanError(
                    f"{DOING}: of the ranks {ranks[:4]} ({len(ranks)} in all) one {verb} {part.box} of tensor "
                    f"{self._moves[tensor].name!r}, expected that each {'holds' if side == 'src' else 'wants'} it in "
                    "one shard; plan again"
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
        """For each part whether every rank of the set beside it has a box that contains it."""
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


def _check_disjoint(moves: Sequence[TensorMove], flows: Flows, copies: Sequence[Copy]) -> None:
    parts = flows.chunks.parts
    copies_of: dict[int, list[Copy]] = {}
    for copy in copies:
        copies_of.setdefault(copy.tensor, []).append(copy)
    none = np.empty(0, dtype=np.int64)
    by_tensor = _rows_by_tensor(parts)
    for tensor, move in enumerate(moves):
        rows: Rows = by_tensor.get(tensor, none)
        ndim = parts.ndims[tensor]
        travelling = BoxArray(parts.starts[rows, :ndim], parts.stops[rows, :ndim])
        if len(travelling) and not is_disjoint(travelling):
            _refuse(f"two chunks share elements of tensor {move.name!r}, expected each element in one chunk")
        here = copies_of.get(tensor, [])
        if not here:
            continue
        kept = BoxArray.of([copy.box for copy in here], ndim)
        if not is_disjoint(kept):
            _refuse(f"two copies share elements of tensor {move.name!r}, expected each element once")
        for part, at in zip(*(side.tolist() for side in find_pairs(travelling, kept)), strict=True):
            row = part if isinstance(rows, slice) else rows[part]
            chunk = int(np.searchsorted(flows.chunks.first_part, row, side="right")) - 1
            twice = set(flows.rank_sets[int(flows.takers[chunk])]).intersection(here[at].ranks)
            if twice:
                _refuse(f"rank {min(twice)} copies {here[at].box} of tensor {move.name!r} and takes some of it as well")


def _check_totals(moves: Sequence[TensorMove], flows: Flows, copies: Sequence[Copy], sides: Sides) -> None:
    """Every rank gets as many elements as it wants and anybody holds."""
    parts = flows.chunks.parts
    got: list[dict[int, int]] = [{} for _ in moves]
    base = len(flows.rank_sets)
    takers = np.repeat(flows.takers, np.diff(flows.chunks.first_part))
    keys, place = distinct(parts.tensor * base + takers, len(moves) * base)
    sizes = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sizes, place, BoxArray(parts.starts, parts.stops).sizes)
    for key, size in zip(keys.tolist(), sizes.tolist(), strict=True):
        tensor, number = divmod(key, base)
        here = got[tensor]
        for rank in flows.rank_sets[number]:
            here[rank] = here.get(rank, 0) + size
    for copy in copies:
        for rank in copy.ranks:
            got[copy.tensor][rank] = got[copy.tensor].get(rank, 0) + copy.box.size
    for move, here in zip(moves, got, strict=True):
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
