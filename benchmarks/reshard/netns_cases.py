"""Cases of moves that are timed on the testbed: the paper's and ours, scaled so that one takes about a second.

``F5``: one device to a mesh of (hosts, devices), Fig. 5 of arXiv 2211.05322. ``F6``: its Table 2, in the order of the
paper. ``N``: what the paper's method cannot do, or cannot do at the bound. Hosts and goals are per case; a goal is a
multiple of the time that a plain send and receive of the bound's bytes takes between two idle hosts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.layout.overlap import flat_ranges
from benchmarks.reshard.planning import TABLE_2, pair_of_specs, rows_to_columns
from remesh.layout import Box, Layout, Mesh, Shard, layout_from_spec
from remesh.resharding import TensorMove

SEED = 7
MIB = 1 << 20
WAYS = ("send_recv", "local_allgather", "global_allgather", "broadcast")
"""The strategies of the paper."""
ORDERS = ("naive", "load_balance", "dfs", "random_greedy", "alpa")
"""The paper's choices of sender and order, and what Alpa's code does."""
GLOO = "gloo broadcast"
"""The backend's own broadcast."""
ONE_BY_ONE = "one by one"
"""Every tensor in a call of its own."""


@dataclass(frozen=True)
class Case:
    """One move, and what it is compared with."""

    name: str
    moves: Sequence[TensorMove]
    host_of: Mapping[int, str]
    """Host of every rank. Invariant: ranks of one host follow each other."""
    goal: float
    """Largest allowed multiple of the bound."""
    peers: Sequence[str] = ()
    """Strategies, `GLOO`, or `ONE_BY_ONE`."""
    rate_of: Mapping[str, float] = field(default_factory=dict)
    """Share of the full rate that a host's link has, where it is not 1."""

    @property
    def ranks_per_host(self) -> dict[str, int]:
        """Number of ranks on each host, in order of rank."""
        counts: dict[str, int] = {}
        for rank in sorted(self.host_of):
            counts[self.host_of[rank]] = counts.get(self.host_of[rank], 0) + 1
        return counts


def all_cases(num_bytes: int, num_devices: int) -> list[Case]:
    """Every case with tensors of about this size; ``num_devices`` on each host where the paper has four."""
    return [*fig_5(num_bytes, num_devices), *table_2(num_bytes, num_devices), *beyond(num_bytes)]


def fig_5(num_bytes: int, num_devices: int) -> list[Case]:
    """One device to (1, 1..n) and to (2..4, 2)."""
    goals = {1: 1.03, 2: 1.03, 3: 1.04, 4: 1.05}
    cases = []
    for mesh in [*((1, devices) for devices in range(1, num_devices + 1)), (2, 2), (3, 2), (4, 2)]:
        move, hosts = pair_of_specs((num_bytes // 4096, 1024), ("RR", (1, 1)), ("RR", mesh))
        name = f"F5 1 -> ({mesh[0]},{mesh[1]})"
        cases.append(Case(name, [move], hosts, goals[mesh[0]], (*WAYS, GLOO) if mesh != (1, 1) else ()))
    return cases


def table_2(num_bytes: int, num_devices: int) -> list[Case]:
    """The published cases; the eighth is not recoverable."""
    cases = []
    for number, (shape, src, dst) in TABLE_2.items():
        # As the paper's shapes, the last dim cut so that int32 fills the bytes; 3 divides the first dim of case 6.
        rows, columns = (384 if shape[0] % 3 == 0 else 128), 128
        scaled = (rows, columns, num_bytes // (4 * rows * columns) // 4 * 4)
        sides = [(spec, (hosts, num_devices)) for spec, (hosts, _) in (src, dst)]
        move, hosts = pair_of_specs(scaled, *sides)
        cases.append(Case(f"F6-{number}: {src[0]} -> {dst[0]}", [move], hosts, 1.05, ("send_recv", *ORDERS)))
    return cases


def beyond(num_bytes: int) -> list[Case]:
    """What sender choice and order of whole slices cannot do."""
    return [
        split(num_bytes),
        triangle(num_bytes),
        uneven_rows(num_bytes),
        rows_and_columns(num_bytes),
        flat_to_tensor_parallel(num_bytes),
        state_dict(num_bytes),
        growing(num_bytes),
        half_rate(num_bytes),
    ]


def split(num_bytes: int) -> Case:
    """Three slices, two replicas that send, three receivers of one each: unsplit, one sender has two slices."""
    move, hosts = pair_of_specs((3 * 64, num_bytes // (3 * 64 * 4)), ("RR", (2, 1)), ("S0R", (3, 1)))
    return Case("N1: 3 slices, 2 replicas send", [move], hosts, 1.04, ORDERS)


def triangle(num_bytes: int) -> Case:
    """Three slices, each wanted by two of three receivers: no two of these multicasts can be exclusive at once."""
    rows, columns = 3 * 64, num_bytes // (3 * 64 * 4)
    thirds = [Box((64 * n, 0), (64 * n + 64, columns)) for n in range(3)]
    src = tuple(Shard(rank, Box((0, 0), (rows, columns))) for rank in range(2))
    dst = tuple(Shard(2 + n, thirds[at]) for n in range(3) for at in sorted({n, (n + 1) % 3}))
    move = TensorMove("x", _layout((rows, columns), src), _layout((rows, columns), _stacked(dst)))
    return Case("N2: triangle {12} {23} {13}", [move], _hosts(2, 3), 1.06, ORDERS)


def uneven_rows(num_bytes: int) -> Case:
    """Rows in parts of 7 : 5 to rows in parts of 2 : 3 : 7, the same matrix."""
    shape = (12 * 16, num_bytes // (12 * 16 * 4))
    src = layout_from_spec("S0R", shape, Mesh.of({"x": 2}), "int32", uneven={0: (7 * 16, 5 * 16)})
    dst = layout_from_spec("S0R", shape, Mesh.of({"x": 3}, [2, 3, 4]), "int32", uneven={0: (2 * 16, 3 * 16, 7 * 16)})
    return Case("N3a: uneven rows", [TensorMove("x", src, dst)], _hosts(2, 3), 1.06)


def rows_and_columns(num_bytes: int) -> Case:
    """``Shard(0)`` on three hosts to ``Shard(1)`` on two."""
    move, hosts = pair_of_specs((3 * 64, num_bytes // (3 * 64 * 4) // 2 * 2), ("S0R", (3, 1)), ("RS0", (2, 1)))
    return Case("N3b: Shard(0) -> Shard(1)", [move], hosts, 1.06, ("naive",))


def flat_to_tensor_parallel(num_bytes: int) -> Case:
    """Flat ranges of a flattened matrix, cut anywhere, to columns."""
    shape = (509, num_bytes // (509 * 4) // 2 * 2)
    size = shape[0] * shape[1]
    cuts = [0, size // 3 + 1, 2 * size // 3 + 5, size]
    src = flat_ranges(shape, cuts, "int32")
    dst = layout_from_spec("RS0", shape, Mesh.of({"tp": 2}, range(3, 5)), "int32")
    return Case("N3c: FSDP flat -> TP", [TensorMove("x", src, dst)], _hosts(3, 2), 1.06)


def state_dict(num_bytes: int) -> Case:
    """Two hundred tensors of 1 KB to 4 MB (a smaller top where fewer bytes are asked for), all to all of four hosts."""
    chance = random.Random(SEED)
    largest = min(num_bytes // 4, 4 * MIB)
    sizes = [int(1024 * (largest / 1024) ** chance.random()) for _ in range(200)]
    moves = [rows_to_columns(f"t{n:03d}", (max(size // 4096, 1) * 4, 256)) for n, size in enumerate(sizes)]
    return Case("N4: 200 tensors fused", moves, _hosts(4, 0), 1.10, (ONE_BY_ONE,))


def growing(num_bytes: int) -> Case:
    """Two hosts become three; two thirds of the bytes stay where they are."""
    shape = (6 * 32, num_bytes // (6 * 32 * 4))
    src = layout_from_spec("S0R", shape, Mesh.of({"x": 2}), "int32")
    # Every host keeps what it can: the new one gets a part of each.
    kept = [Shard(0, Box((0, 0), (64, shape[1]))), Shard(1, Box((128, 0), (192, shape[1])))]
    dst = _layout(shape, (*kept, Shard(2, Box((64, 0), (128, shape[1])))))
    return Case("N5: grow 2 -> 3 hosts", [TensorMove("x", src, dst)], _hosts(3, 0), 1.06)


def half_rate(num_bytes: int) -> Case:
    """Two replicas send, one of them on a link of half the rate."""
    move, hosts = pair_of_specs((3 * 64, num_bytes // (3 * 64 * 4)), ("RR", (2, 1)), ("S0R", (3, 1)))
    return Case("N6: one sender at half rate", [move], hosts, 1.08, ORDERS, {"src1": 0.5})


def _hosts(num_src: int, num_dst: int) -> dict[int, str]:
    """One rank on each host."""
    names = [*(f"src{n}" for n in range(num_src)), *(f"dst{n}" for n in range(num_dst))]
    return dict(enumerate(names))


def _layout(shape: tuple[int, ...], shards: tuple[Shard, ...]) -> Layout:
    return Layout(shape, shards, "int32")


def _stacked(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Shards of one holder one after the other in its buffer."""
    end: dict[object, int] = {}
    placed = []
    for shard in shards:
        placed.append(Shard(shard.holder, shard.box, end.get(shard.holder, 0)))
        end[shard.holder] = placed[-1].offset + shard.box.size
    return tuple(placed)
