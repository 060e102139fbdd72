"""Cases to plan, and a machine that carries plans out element by element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from remesh.layout import Box, Layout, Mesh, layout_from_spec
from remesh.resharding import Plan, TensorMove
from remesh.resharding.model.network import HostLink, Network
from remesh.resharding.schedule.chunks import Chunks
from remesh.resharding.schedule.rows import Rows
from tests.support.layouts import complete_layouts, layouts, shapes

RATES = st.floats(1e3, 1e12)
DTYPES = ("int8", "bfloat16", "float32", "int64", "complex128")


@st.composite
def move_lists(draw: st.DrawFn, complete: bool = True) -> list[TensorMove]:
    """One to four tensors, each with any two layouts; the source holds all of it, or not."""
    moves = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(shapes())
        dtype = draw(st.sampled_from(DTYPES))
        src = draw(complete_layouts(shape) if complete else layouts(shape))
        dst = draw(layouts(shape))
        moves.append(TensorMove(f"t{number}", _ranks_only(src, dtype), _ranks_only(dst, dtype)))
    return moves


def _ranks_only(layout: Layout, dtype: str) -> Layout:
    names = {holder: number for number, holder in enumerate(layout.holders)}
    ranks = {holder: holder if isinstance(holder, int) else 20 + names[holder] for holder in layout.holders}
    return Layout(layout.global_shape, layout.map_holders(ranks).shards, dtype)


def ranks_of(moves: Sequence[TensorMove]) -> list[int]:
    return sorted({int(rank) for move in moves for layout in (move.src, move.dst) for rank in layout.holders})


@st.composite
def host_maps(draw: st.DrawFn, moves: Sequence[TensorMove]) -> dict[int, str]:
    """A host for every rank: one for all, one for each, or any."""
    num_hosts = draw(st.integers(1, 6))
    return {rank: f"h{draw(st.integers(0, num_hosts - 1))}" for rank in ranks_of(moves)}


@st.composite
def networks(draw: st.DrawFn, hosts: list[str]) -> Network:
    """Any links for these hosts, some of them in racks, some racks with an uplink."""
    racks = [None, "r0", "r1"]
    links = {
        host: HostLink(
            draw(RATES),
            draw(st.integers(1, 3)),
            draw(st.one_of(st.just(math.inf), RATES)),
            draw(st.sampled_from(racks)),
        )
        for host in hosts
    }
    inhabited = sorted({link.rack for link in links.values() if link.rack is not None})
    uplinks = {rack: draw(RATES) for rack in inhabited if draw(st.booleans())}
    return Network(links, draw(st.floats(0, 1)), uplinks)


def simulate(plan: Plan) -> dict[tuple[str, int], npt.NDArray[np.int64]]:
    """What every rank has of every tensor it wants, after the plan: global indices of elements, -1 where nothing came.

    Fails when a rank sends an element that it does not have at that time, or an element comes twice.
    """
    has: dict[tuple[int, int], set[int]] = {}
    got: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
    for number, move in enumerate(plan.moves):
        for rank in move.src.holders:
            has[number, int(rank)] = {
                index for shard in move.src.shards_of(rank) for index in elements(move, shard.box).tolist()
            }
        for rank in move.dst.holders:
            got[number, int(rank)] = np.full(move.dst.size, -1)

    def give(number: int, box: Box, rank: int) -> None:
        found = elements(plan.moves[number], box)
        assert (got[number, rank][found] == -1).all(), "an element came twice"
        got[number, rank][found] = found

    for copy in plan.copies:
        for rank in copy.ranks:
            assert set(elements(plan.moves[copy.tensor], copy.box).tolist()) <= has[copy.tensor, rank]
            give(copy.tensor, copy.box, rank)
    arriving: list[tuple[int, int, list[int]]] = []
    now = 0
    busy: set[tuple[int, int, str]] = set()
    for message in plan.messages:
        ends = {(message.round, message.giver, "gives"), (message.round, message.taker, "takes")}
        assert busy.isdisjoint(ends), "a rank gives or takes twice in a round"
        busy |= ends
        if message.round > now:
            for number, rank, found in arriving:
                has.setdefault((number, rank), set()).update(found)
            arriving, now = [], message.round
        for part in plan.chunks[message.chunk].parts:
            found = elements(plan.moves[part.tensor], part.box).tolist()
            assert set(found) <= has[part.tensor, message.giver], "a rank sends what it has not"
            give(part.tensor, part.box, message.taker)
            arriving.append((part.tensor, message.taker, found))
    return {(plan.moves[number].name, rank): values for (number, rank), values in got.items()}


def written_out(plan: Plan) -> Plan:
    """The same plan with a row for every message; the check looks at each of them."""
    numbers = [number for number, chunk in enumerate(plan.chunks) if chunk.parts]
    place = np.full(len(plan.chunks), -1)
    place[numbers] = np.arange(len(numbers))
    chunks = Chunks.of([plan.chunks[number] for number in numbers], tuple(move.src.ndim for move in plan.moves))
    messages = plan.messages.columns
    rows = Rows.of_messages(plan.host_of, chunks, replace(messages, chunk=place[messages.chunk]))
    return replace(plan, rows=rows)


def elements(move: TensorMove, box: Box) -> npt.NDArray[np.int64]:
    """Flat global indices of a box, row-major."""
    whole = np.arange(move.src.size).reshape(move.src.global_shape)
    found: npt.NDArray[np.int64] = whole[box.slices()].reshape(-1)
    return found


def expected_of(move: TensorMove, rank: int) -> npt.NDArray[np.int64]:
    """What a rank should have after the move: every index it wants and anybody holds, -1 elsewhere."""
    held: set[int] = set()
    for shard in move.src.shards:
        held.update(elements(move, shard.box).tolist())
    values = np.full(move.dst.size, -1)
    for shard in move.dst.shards_of(rank):
        for index in elements(move, shard.box).tolist():
            if index in held:
                values[index] = index
    return values


def pair_of_specs(
    shape: Sequence[int], src: tuple[str, tuple[int, int]], dst: tuple[str, tuple[int, int]]
) -> tuple[TensorMove, dict[int, str]]:
    """A move between two disjoint meshes of (hosts, devices), as in the tables of the paper; and its hosts."""
    sides = []
    hosts: dict[int, str] = {}
    first = 0
    for name, (spec, (num_hosts, num_devices)) in (("src", src), ("dst", dst)):
        mesh = Mesh.of({"host": num_hosts, "device": num_devices}, range(first, first + num_hosts * num_devices))
        sides.append(layout_from_spec(spec, tuple(shape), mesh, "int32"))
        hosts |= {rank: f"{name}{(rank - first) // num_devices}" for rank in mesh.world_ranks}
        first += mesh.size
    return TensorMove("x", sides[0], sides[1]), hosts


def nic_loads(plan: Plan, host_of: Mapping[int, str]) -> dict[tuple[str, str], int]:
    """Bytes out of and into every host."""
    loads: dict[tuple[str, str], int] = {}
    for message in plan.messages:
        a, b = host_of[message.giver], host_of[message.taker]
        if a != b:
            for end in ((a, "out"), (b, "in")):
                loads[end] = loads.get(end, 0) + plan.chunks[message.chunk].nbytes
    return loads
