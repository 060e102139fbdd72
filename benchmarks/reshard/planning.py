"""Quality of plans (over the lower bound) and time of planning: planner only, no process.

The ratio of a plan is the traffic of its busiest NIC over the bound; 1.0 cannot be beaten. Planning is one thread that
waits for nothing, so its seconds are of processor time: those of the clock would include what else the machine does.
Cases: Table 2 of arXiv 2211.05322 at its own sizes; random pairs of specs; a state dict; and a thousand devices.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from benchmarks.report import Row, at_most
from remesh.layout import Box, Layout, Mesh, Shard, layout_from_spec
from remesh.resharding import HostLink, Network, TensorMove, plan_reshard

SEED = 20
T = TypeVar("T")
_LETTERS = ("R", "S0", "S1")

TABLE_2 = {
    "1": ((1024, 1024, 512), ("S0RR", (2, 4)), ("S0RR", (2, 4))),
    "2": ((1024, 1024, 512), ("RRR", (2, 4)), ("S0RR", (2, 4))),
    "3": ((1024, 1024, 512), ("RS0R", (2, 4)), ("S0RR", (2, 4))),
    "4": ((1024, 1024, 512), ("RS01R", (2, 4)), ("S01RR", (2, 4))),
    "5": ((1024, 1024, 512), ("S1RR", (2, 4)), ("S0RR", (2, 4))),
    "6": ((3072, 1024, 170), ("S0RR", (2, 4)), ("S0RR", (3, 4))),
    "7": ((1024, 1024, 512), ("S1RR", (1, 4)), ("RRR", (2, 4))),
    "9": ((1024, 1024, 512), ("RS0R", (2, 4)), ("RRS0", (2, 4))),
}

Side = tuple[str, tuple[int, int]]
"""A spec, and a mesh of (hosts, devices on each)."""


def pair_of_specs(shape: Sequence[int], src: Side, dst: Side) -> tuple[TensorMove, dict[int, str]]:
    """A move between two disjoint meshes, and the hosts of its ranks."""
    sides: list[Layout] = []
    hosts: dict[int, str] = {}
    for name, (spec, (num_hosts, num_devices)) in (("src", src), ("dst", dst)):
        first = len(hosts)
        mesh = Mesh.of({"host": num_hosts, "device": num_devices}, range(first, first + num_hosts * num_devices))
        sides.append(layout_from_spec(spec, tuple(shape), mesh, "int32"))
        hosts |= {rank: f"{name}{(rank - first) // num_devices}" for rank in mesh.world_ranks}
    return TensorMove("x", sides[0], sides[1]), hosts


def table_2() -> list[Row]:
    """The published cases."""
    rows = []
    for case, (shape, src, dst) in TABLE_2.items():
        move, hosts = pair_of_specs(shape, src, dst)
        plan = plan_reshard([move], hosts)
        bound = plan.lower_bound_bytes / move.src.nbytes
        rows.append(at_most(f"table 2 case {case}: NIC over bound", plan.certified_ratio, "ratio", 1.005, bound=bound))
    return rows


def random_specs(num_pairs: int) -> list[Row]:
    """Pairs of random specs on random meshes; the worst ratio counts."""
    chance = random.Random(SEED)
    ratios: list[float] = []
    while len(ratios) < num_pairs:
        shape = [chance.choice([48, 60, 64, 97]) for _ in range(3)]
        src, dst = ((_random_spec(chance), (chance.randint(1, 4), 4)) for _ in range(2))
        move, hosts = pair_of_specs(shape, src, dst)
        ratios.append(plan_reshard([move], hosts, chunk_bytes=1 << 16).certified_ratio)
    return [at_most(f"random pairs of specs: worst NIC over bound of {num_pairs}", max(ratios), "ratio", 1.05)]


def _random_spec(chance: random.Random) -> str:
    dims = ["R", "R", "R"]
    if chance.random() < 0.2:
        dims[chance.randrange(3)] = "S01"
        return "".join(dims)
    for axis in ("S0", "S1"):
        if chance.random() < 0.7:
            dim = chance.randrange(3)
            dims[dim] = axis if dims[dim] == "R" else dims[dim]
    return "".join(dims)


def state_dict(num_tensors: int) -> list[Row]:
    """A whole state over 4 ranks, rows to columns: tensors of equal layout, and all different."""
    rows = []
    hosts = {rank: f"host{rank}" for rank in range(4)}
    for kind, sizes in (("of 3 shapes", 3), ("all different", num_tensors)):
        moves = [rows_to_columns(f"t{n:04d}", (256 + 4 * (n % sizes), 512)) for n in range(num_tensors)]
        seconds, _ = timed(lambda moves=moves: plan_reshard(moves, hosts).digest)  # type: ignore[misc]
        rows.append(at_most(f"plan and digest of {num_tensors} tensors over 4 ranks, {kind}", seconds, "s", 0.05))
    return rows


def rows_to_columns(name: str, shape: tuple[int, int]) -> TensorMove:
    """A matrix over 4 ranks, cut the other way."""
    rows = [Box((shape[0] * n // 4, 0), (shape[0] * (n + 1) // 4, shape[1])) for n in range(4)]
    columns = [Box((0, shape[1] * n // 4), (shape[0], shape[1] * (n + 1) // 4)) for n in range(4)]
    src, dst = (tuple(Shard(n, box) for n, box in enumerate(boxes)) for boxes in (rows, columns))
    return TensorMove(name, Layout(shape, src, "float32"), Layout(shape, dst, "float32"))


PAIRS = (
    *(("S0R", "S01R"), ("RR", "S01R"), ("S01R", "S01R"), ("S0R", "S1R"), ("RS1", "S01R"), ("S0S1", "S1S0")),
    *(("S0R", "RS0"), ("S0R", "RR"), ("RR", "RR"), ("S01R", "RS1"), ("S01R", "RR")),
)
"""Specs on meshes of (hosts, devices) between which states move: data, tensor and fully sharded parallel, replicas."""
_FEW_HOSTS = 128


def many_devices(num_hosts: int) -> list[Row]:
    """Eight devices on each host, a mesh split in two halves, as between trainer and generator."""
    rows = []
    for src, dst in PAIRS:
        move, hosts = pair_of_halves(src, dst, num_hosts)
        seconds, plan = timed(lambda move=move, hosts=hosts: plan_reshard([move], hosts), repeat=3)  # type: ignore[misc]
        case = f"{src} to {dst}, {num_hosts * 8} devices on {num_hosts} hosts"
        rows.append(at_most(f"plan of {case}", seconds, "s", 0.05 if num_hosts <= _FEW_HOSTS else 2.0))
        rows.append(at_most(f"NIC over bound of {case}", plan.certified_ratio, "ratio", 1.05))
    return rows


LINKS = ("latency", "rails and latency", "racks and latency", "racks, rails and latency")
"""What is known of the links between many hosts."""
_RATE_BYTES_PER_S = 5e10
_LATENCY_S = 1e-4
_HOSTS_IN_RACK = 8


def over_links(num_hosts: int) -> list[Row]:
    """What everyone wants whole, on links where latency counts: the plan is compared with others where it may lose."""
    rows = []
    for links in LINKS:
        move, hosts = pair_of_halves("S01R", "RR", num_hosts)
        network = network_of(tuple(dict.fromkeys(hosts.values())), links)
        seconds, plan = timed(lambda m=move, h=hosts, n=network: plan_reshard([m], h, network=n), repeat=3)  # type: ignore[misc]
        case = f"S01R to RR with {links}, {num_hosts * 8} devices on {num_hosts} hosts"
        rows.append(at_most(f"plan of {case}", seconds, "s", 0.05 if num_hosts <= _FEW_HOSTS else 2.0))
        rows.append(at_most(f"busiest link over bound of {case}", plan.certified_ratio, "ratio", 1.05))
    return rows


def replicas_on_two_hosts(num_pieces: int) -> list[Row]:
    """Pieces with sixteen replicas, on two hosts of eight devices each, of which every rank wants something else."""
    move, _ = pair_of_specs((8192, 8192), ("S0R", (num_pieces, 16)), ("RS01", (num_pieces, 16)))
    hosts = {rank: f"host{rank // 8:05}" for rank in range(num_pieces * 32)}
    seconds, plan = timed(lambda: plan_reshard([move], hosts), repeat=1)
    case = f"S0R to RS01, {len(hosts)} devices, 16 replicas on two hosts each"
    return [
        at_most(f"plan of {case}", seconds, "s", 2.0),
        at_most(f"NIC over bound of {case}", plan.certified_ratio, "ratio", 1.05),
    ]


def network_of(hosts: Sequence[str], links: str) -> Network:
    """Hosts of 400 Gbit/s, on one NIC or eight; racks of eight hosts, of which four can leave at full rate."""
    num_nics = 8 if "rails" in links else 1
    rack_of = {
        host: f"rack{number // _HOSTS_IN_RACK:03}" if "racks" in links else None for number, host in enumerate(hosts)
    }
    nics = {host: HostLink(_RATE_BYTES_PER_S / num_nics, num_nics, rack=rack) for host, rack in rack_of.items()}
    uplink = _RATE_BYTES_PER_S * _HOSTS_IN_RACK / 2
    return Network(nics, _LATENCY_S, {rack: uplink for rack in rack_of.values() if rack is not None})


def pair_of_halves(src: str, dst: str, num_hosts: int, num_devices: int = 8) -> tuple[TensorMove, Mapping[int, str]]:
    """A matrix on one half of the hosts, wanted on the other."""
    half = (num_hosts // 2, num_devices)
    return pair_of_specs((8192, 4096), (src, half), (dst, half))


def timed(act: Callable[[], T], repeat: int = 5, clock: Callable[[], float] = time.thread_time) -> tuple[float, T]:
    """Least seconds of processor time of some runs, and the last result."""
    best = float("inf")
    for _ in range(repeat):
        started = clock()
        result = act()
        best = min(best, clock() - started)
    return best, result
