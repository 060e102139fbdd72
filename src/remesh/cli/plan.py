"""``remesh plan``: what a move between two layouts would do, without any rank being there."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from remesh.cli.shown import JSON, print_json, print_table, say, say_text, waiting, width_of_terminal, with_progress
from remesh.cli.small_files import OutputFile, OutputPath, read_json
from remesh.foundation.errors import ConfigError
from remesh.layout import Layout, Mesh, Overlap, Shard, compute_overlap, layout_from_spec
from remesh.layout.box_array import join_grids
from remesh.resharding import DEFAULT_CHUNK_BYTES, Plan, TensorMove, plan_reshard
from remesh.resharding.model.network import Network
from remesh.resharding.pictures.draw import Lanes, draw_svg, draw_text
from remesh.resharding.pictures.trace import build_trace
from remesh.resharding.planning.simulate import SimulatedRun, simulate_plan
from remesh.resharding.schedule.paper import STRATEGIES

_SIDE = re.compile(r"(?P<spec>[RS0-9(),]*)@(?P<mesh>\d{1,6}(?:x\d{1,6})*)(?::(?P<host>\d{1,6}))?", re.ASCII)
_MAX_RANKS = 1 << 20
_MAX_ROWS = 16
_MAX_LISTED = 1 << 16
"""Of more slices only those that are shown are made, where their number is known without."""
_MAX_PLANNED = 1 << 20
_MAX_SIMULATED = 200_000
"""More messages are simulated, which takes seconds, only for a picture or trace that is asked for."""
_OWN_STRATEGIES = ("auto", "split")


@dataclass(frozen=True, slots=True)
class MoveSide:
    """One side of a move, as ``SPEC@MESH[:HOST]`` gives it."""

    spec: str
    mesh_shape: tuple[int, ...]
    """Invariant: at least one axis; sizes >= 1."""
    first_host: int
    """Number of its first host."""

    @property
    def devices_per_host(self) -> int:
        """The last axis lies inside hosts, unless it is the only one."""
        return self.mesh_shape[-1] if len(self.mesh_shape) > 1 else 1

    @property
    def num_hosts(self) -> int:
        return math.prod(self.mesh_shape) // self.devices_per_host


@click.command()
@click.option("--shape", required=True, help="Shape of the tensor, as in 1024,1024.")
@click.option("--dtype", default="float32", show_default=True, help="Dtype of the tensor.")
@click.option("--src", required=True, help="Source layout as SPEC@MESH[:HOST], for example S0R@2x4; see above.")
@click.option("--dst", required=True, help="Destination layout, in the same form.")
@click.option(
    "--network",
    type=click.Path(path_type=Path),
    help="JSON file with the links of the hosts, as remesh net probe writes it.",
)
@click.option(
    "--hosts", default="", help="Names of the hosts, in order: a,b,c (default: those of the network, or host0, ...)."
)
@click.option(
    "--strategy",
    type=click.Choice([*_OWN_STRATEGIES, *STRATEGIES]),
    default="auto",
    show_default=True,
    help="Strategy that chooses routes and order.",
)
@click.option(
    "--chunk-bytes",
    type=click.IntRange(1),
    default=DEFAULT_CHUNK_BYTES,
    show_default=True,
    help="Largest size of a message, in bytes.",
)
@click.option("--compare", is_flag=True, help="Also simulate every other strategy.")
@click.option("--by-rank", is_flag=True, help="Draw ranks instead of hosts in the picture.")
@click.option("--svg", type=OutputPath(), help="Write the picture to this file.")
@click.option("--trace", type=OutputPath(), help="Write a Chrome trace of the simulated run to this file.")
@click.option("--out", type=OutputPath(), help="Write the plan as JSON to this file.")
@JSON
def plan(
    shape: str,
    dtype: str,
    src: str,
    dst: str,
    network: Path | None,
    hosts: str,
    strategy: str,
    chunk_bytes: int,
    compare: bool,
    by_rank: bool,
    svg: OutputFile | None,
    trace: OutputFile | None,
    out: OutputFile | None,
    as_json: bool,
) -> None:
    """Plan a transfer between two layouts: unit tasks, lower bound, ratio to it, rounds.

    A side is SPEC@MESH[:HOST]. SPEC has R or S and mesh axes for each dim (S01R). MESH has the size of each axis (2x4);
    the last axis lies inside a host, unless it is the only one. HOST is the number of the first host; the source
    begins at 0, the destination behind the source: give it :0 to stay on the same hosts.

    \b
    remesh plan --shape 3072,1024 --src S0R@2x4 --dst S0R@3x4 --compare
    """
    links = Network.from_json(read_json(network, "the network file")) if network else None
    move, host_of = build_move(parse_shape(shape), dtype, src, dst, _host_names(hosts, links))
    _refuse_too_many(move, chunk_bytes)
    with waiting("planning"):
        made = plan_reshard([move], host_of, chunk_bytes=chunk_bytes, network=links, strategy=strategy)
        simulation = simulate_plan(made) if svg or trace or len(made.messages) <= _MAX_SIMULATED else None
    others = _compare(move, host_of, links, chunk_bytes) if compare else []
    if as_json:
        print_json(_form(made, simulation, strategy, others))
    else:
        _show_tasks(move, host_of)
        print_table(("plan", strategy), _summary(made, simulation))
    if compare and not as_json:
        _show_comparison(others)
    if out:
        out.write(json.dumps(made.to_json()), err=as_json)
    if simulation is None:
        return
    lanes = Lanes.RANKS if by_rank else Lanes.HOSTS
    unit = "bytes of one NIC's time" if links is None else "s"
    width = max(width_of_terminal() - 16 - max(map(len, host_of.values())), 20)
    if not as_json:
        say_text(draw_text(simulation.messages, made.host_of, lanes=lanes, width=width, unit=unit))
    title = f"{src} to {dst}, {dtype} {shape}, {strategy}"
    bound = float(made.lower_bound_bytes) if made.lower_bound_s is None else made.lower_bound_s
    if svg:
        picture = draw_svg(simulation.messages, made.host_of, lanes=lanes, title=title, unit=unit, bound_s=bound)
        svg.write(picture, err=as_json)
    if trace:
        trace.write(json.dumps(build_trace({"planned": simulation.messages}, made.host_of)), err=as_json)


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that ``"1024,1024"`` means; empty text is a scalar."""
    sizes = [size.strip() for size in text.split(",")] if text.strip() else []
    if not all(size.isdecimal() and len(size) < 16 for size in sizes):
        raise ConfigError(f"reading --shape {text!r}: expected sizes with commas between them, as in 1024,1024")
    return tuple(map(int, sizes))


def parse_side(text: str, which: str, first_host: int) -> MoveSide:
    """The side that ``"S0R@2x4:1"`` means; ``first_host`` where it names none."""
    found = _SIDE.fullmatch(text)
    shape = tuple(map(int, found["mesh"].split("x"))) if found else ()
    if found is None or not 1 <= math.prod(shape) <= _MAX_RANKS:
        raise ConfigError(
            f"reading --{which} {text!r}: expected SPEC@MESH[:HOST], as in S01R@2x4 or RS0@4:0, with 1 to {_MAX_RANKS} "
            "devices"
        )
    return MoveSide(found["spec"], shape, int(found["host"]) if found["host"] else first_host)


def build_move(
    shape: tuple[int, ...], dtype: str, src: str, dst: str, names: tuple[str, ...] | None
) -> tuple[TensorMove, dict[int, str]]:
    """The move between two sides, and the host of every rank; device ``d`` of host ``h`` is one rank on both sides."""
    source = parse_side(src, "src", 0)
    target = parse_side(dst, "dst", source.first_host + source.num_hosts)
    width = max(source.devices_per_host, target.devices_per_host)
    num_hosts = max(side.first_host + side.num_hosts for side in (source, target))
    if names is None:
        names = tuple(f"host{number}" for number in range(num_hosts))
    if len(names) < num_hosts or len(set(names)) != len(names):
        raise ConfigError(
            f"placing --src {src} and --dst {dst}: they need {num_hosts} hosts, found {len(set(names))} host names; "
            "give more with --hosts or in the network file, or move a side with :HOST"
        )
    layouts: list[Layout] = []
    host_of: dict[int, str] = {}
    for side in (source, target):
        ranks = [
            (side.first_host + number // side.devices_per_host) * width + number % side.devices_per_host
            for number in range(math.prod(side.mesh_shape))
        ]
        axes = {f"axis{number}": size for number, size in enumerate(side.mesh_shape)}
        layouts.append(layout_from_spec(side.spec, shape, Mesh.of(axes, ranks), dtype))
        host_of |= {rank: names[rank // width] for rank in ranks}
    return TensorMove("tensor", layouts[0], layouts[1]), dict(sorted(host_of.items()))


def _refuse_too_many(move: TensorMove, chunk_bytes: int) -> None:
    """Raise `ConfigError` for more messages than can be planned while somebody waits."""
    num_bytes = sum(shard.box.size for shard in move.dst.shards) * move.dst.itemsize_bytes
    if num_bytes // chunk_bytes > _MAX_PLANNED:
        raise ConfigError(
            f"planning a move of {num_bytes:,} bytes: found {num_bytes // chunk_bytes:,} messages of {chunk_bytes:,} "
            f"bytes, expected at most {_MAX_PLANNED:,}; give --chunk-bytes {-(-num_bytes // _MAX_PLANNED)} or more"
        )


def _host_names(text: str, network: Network | None) -> tuple[str, ...] | None:
    if text:
        return tuple(name.strip() for name in text.split(","))
    return None if network is None else tuple(network.hosts)


def _show_tasks(move: TensorMove, host_of: dict[int, str]) -> None:
    num_tasks, slices = _slices_to_show(move)
    rows = []
    for each in itertools.islice(slices, _MAX_ROWS):
        nbytes = each.box.size * move.src.itemsize_bytes
        rows.append((str(each.box), f"{nbytes:,}", _ends(each.givers, host_of), _ends(each.takers, host_of)))
    if num_tasks > _MAX_ROWS:
        rows.append((f"... {num_tasks - _MAX_ROWS} more", "", "", ""))
    say(f"{num_tasks} unit tasks")
    print_table(("box", "bytes", "held on", "wanted on"), rows, right=("bytes",))


def _slices_to_show(move: TensorMove) -> tuple[int, Overlap]:
    """How many slices there are, and as many of them as are shown at least."""
    join = join_grids(move.src.atoms.boxes, move.dst.atoms.boxes)
    if join is None or join.num_pairs <= _MAX_LISTED:
        overlap = compute_overlap(move.src, move.dst)
        return len(overlap), overlap
    # Of two grids without a hole the number is known; the pieces that come first have enough to show.
    enough = int(np.searchsorted(np.cumsum(join.met), _MAX_ROWS)) + 1
    first = [shard for shards in move.dst.atoms.shards[:enough] for shard in shards]
    return join.num_pairs, compute_overlap(move.src, replace(move.dst, shards=tuple(first)))


def _ends(shards: tuple[Shard, ...], host_of: dict[int, str]) -> str:
    ranks = {shard.holder for shard in shards if isinstance(shard.holder, int)}
    hosts = list(dict.fromkeys(host_of[rank] for rank in sorted(ranks)))
    listed = ", ".join(hosts[:3]) + (", ..." if len(hosts) > 3 else "")
    return f"{listed} ({len(ranks)} device{'s' if len(ranks) > 1 else ''})"


def _summary(made: Plan, simulation: SimulatedRun | None) -> Iterator[tuple[str, str]]:
    yield "lower bound", f"{made.lower_bound_bytes:,} bytes: {made.bound.reason}"
    if made.lower_bound_s is not None:
        yield "", f"{made.lower_bound_s:.4g} s on this network"
    yield "busiest host", f"{made.busiest_nic_bytes:,} bytes in one direction"
    yield "certified ratio", f"{made.certified_ratio:.4f}"
    duration = _times(simulation.total_s, made) if simulation else "not with so many messages, unless --svg asks for it"
    yield "simulated", duration
    yield "rounds", f"{made.num_rounds:,} with {len(made.messages):,} messages"
    yield "kept in place", f"{made.bytes_copied:,} bytes"
    if simulation:
        staging = max(simulation.peak_staging_bytes.values(), default=0)
        yield "under way on a rank", f"at most {staging:,} bytes"
    yield "digest", made.digest[:16]


def _times(total_s: float, made: Plan) -> str:
    if made.lower_bound_s is None:
        return f"{total_s / made.lower_bound_bytes:.4f} x bound" if made.lower_bound_bytes else "nothing to wait for"
    ratio = f" = {total_s / made.lower_bound_s:.4f} x bound" if made.lower_bound_s else ""
    return f"{total_s:.4g} s{ratio}"


def _form(
    made: Plan, simulation: SimulatedRun | None, strategy: str, others: list[tuple[str, Plan, float]]
) -> dict[str, Any]:
    """What is shown of a plan, for programs; simulated times are seconds on a network, else bytes of one NIC's time."""
    return {
        "strategy": strategy,
        "lower_bound_bytes": made.lower_bound_bytes,
        "lower_bound_s": made.lower_bound_s,
        "reason": made.bound.reason,
        "busiest_nic_bytes": made.busiest_nic_bytes,
        "certified_ratio": made.certified_ratio,
        "simulated": None if simulation is None else simulation.total_s,
        "num_rounds": made.num_rounds,
        "num_messages": len(made.messages),
        "kept_in_place_bytes": made.bytes_copied,
        "staging_bytes": None if simulation is None else max(simulation.peak_staging_bytes.values(), default=0),
        "digest": made.digest,
        "others": [
            {
                "strategy": name,
                "simulated": total,
                "busiest_nic_bytes": other.busiest_nic_bytes,
                "num_messages": len(other.messages),
            }
            for name, other, total in others
        ],
    }


def _compare(
    move: TensorMove, host_of: dict[int, str], network: Network | None, chunk_bytes: int
) -> list[tuple[str, Plan, float]]:
    """Every other strategy, its plan, and what that takes when it is simulated."""
    found = []
    for name in with_progress((_OWN_STRATEGIES[1], *STRATEGIES), "comparing"):
        made = plan_reshard([move], host_of, chunk_bytes=chunk_bytes, network=network, strategy=name)
        found.append((name, made, simulate_plan(made).total_s))
    return found


def _show_comparison(others: list[tuple[str, Plan, float]]) -> None:
    say("other strategies, simulated")
    headings = ("strategy", "time", "busiest host, bytes", "messages")
    rows = [
        (name, _times(total, made), f"{made.busiest_nic_bytes:,}", f"{len(made.messages):,}")
        for name, made, total in others
    ]
    print_table(headings, rows, right=headings[1:])
