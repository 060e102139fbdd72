"""Moves on a real network, beside their lower bound: hosts with shaped links, real TCP, real bytes.

A case's value is the time of a move over ``t``, the time that a plain gloo send and receive of the bound's bytes takes
between two idle hosts of the case; the median over runs that take turns. Nothing can beat 1. Beside it stand what the
paper proposes and what others do. When ``t`` itself varies, or the machine is busy, a row has no goal: it proves
nothing.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.report import Row, at_least, at_most, median_of, spread_of
from benchmarks.reshard.netns_cases import GLOO, MIB, ONE_BY_ONE, Case, all_cases
from benchmarks.reshard.netns_ranks import Told, Work, measure
from benchmarks.reshard.settings import Settings, choose
from remesh.resharding import plan_reshard
from remesh.resharding.model.network import HostLink, Network
from remesh.resharding.planning.simulate import simulate_plan
from remesh.resharding.planning.transfer import Transfer
from remesh.testbed import BedSpec, HostSpec, Testbed

OURS = "remesh"
MAX_T_SPREAD = 0.03
MAX_LOAD = 2.0
_PROTOCOL = 1.07
"""Headers of Ethernet, IP and TCP add 4.6 % to full packets; what goes the other way is acknowledged, with up to 2.3 %;
ranks agree before they begin."""
_TIMEOUT_S = 900.0
_START_S = 12.0
"""What a testbed and its ranks take to start and to end, on two cores."""


def why_not() -> str:
    """What this machine lacks for a testbed; empty when it lacks nothing."""
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"needs {' and '.join(absent)}, not on the path"
    return "" if os.geteuid() == 0 else "needs root, for network namespaces"


def chosen_cases(settings: Settings) -> list[Case]:
    """The cases to measure, without their peers when only ours is to run."""
    cases = {case.name: case for case in all_cases(settings.size_mib * MIB, settings.num_devices)}
    chosen = [cases[name] for name in choose(list(cases), settings)]
    return chosen if settings.with_peers else [replace(case, peers=()) for case in chosen]


def rows(settings: Settings) -> Iterator[list[Row]]:
    """The rows of one case after the other."""
    for case in chosen_cases(settings):
        yield rows_of(case, rate_mbit=settings.rate_mbit, repeat=settings.num_repeats)


def rows_of(case: Case, *, rate_mbit: int = 100, repeat: int = 3) -> list[Row]:
    """The rows of one case: ours, its peers, the bytes over the NICs, and how busy the machine was."""
    network = _network_of(case, rate_mbit)
    work = work_of(case, network, repeat)
    hosts = [HostSpec(host, network.hosts[host].rate_bytes_per_s) for host in case.ranks_per_host]
    with Testbed(BedSpec(tuple(hosts))) as bed:
        told: list[Told] = bed.run(measure, case.ranks_per_host, (work,), timeout_s=_TIMEOUT_S)
        load = os.getloadavg()[0]
    times = {
        name: [max(run) for run in zip(*(each.seconds[name] for each in told), strict=True)] for name in told[0].seconds
    }
    t = median_of(f"{case.name}: t", times["t"], "s")
    return [*_against_bound(case, times, load), _nic_row(case, work, told), t, Row(f"{case.name}: load", load, "load")]


def print_estimate(settings: Settings) -> None:
    """How many minutes `rows` will take, as far as simulated plans can tell."""
    total_s = 0.0
    for case in chosen_cases(settings):
        network = _network_of(case, settings.rate_mbit)
        work = work_of(case, network, settings.num_repeats)
        turn_s = {name: simulate_plan(transfer.plan, network).total_s for name, transfer in work.plans.items()}
        bound_s = work.plans[OURS].plan.lower_bound_s or 0.0
        turn_s["t"] = bound_s
        if work.broadcast:  # gloo sends whole copies down a binary tree
            turn_s[work.broadcast] = bound_s * math.ceil(math.log2(len(case.host_of)))
        if work.one_by_one:
            turn_s[work.one_by_one] = 3 * bound_s
        case_s = _START_S + settings.num_repeats * sum(turn_s.values())
        total_s += case_s
        print(f"{case.name:<40} {len(case.host_of):>3} ranks {case_s:>6.0f} s", flush=True)
    print(f"{settings.links}, {settings.num_repeats} repeats: about {total_s / 60:.0f} minutes")


def _network_of(case: Case, rate_mbit: int) -> Network:
    rate_bytes_per_s = rate_mbit * 125_000
    return Network({host: HostLink(rate_bytes_per_s * case.rate_of.get(host, 1.0)) for host in case.ranks_per_host})


def work_of(case: Case, network: Network, repeat: int) -> Work:
    """Plans of all contestants of a case, and the plain message that takes as long as its bound."""
    plans = {OURS: plan_reshard(case.moves, case.host_of, network=network)}
    for peer in case.peers:
        if peer not in (GLOO, ONE_BY_ONE):
            plans[peer] = plan_reshard(case.moves, case.host_of, network=network, strategy=peer)
    transfers = {name: Transfer.of(plan) for name, plan in plans.items()}
    bound_s = plans[OURS].lower_bound_s
    assert bound_s is not None
    full = max(link.rate_bytes_per_s for link in network.hosts.values())
    first = {host: rank for rank, host in sorted(case.host_of.items(), reverse=True)}
    idle = [rank for host, rank in first.items() if network.hosts[host].rate_bytes_per_s == full]
    return Work(
        moves=case.moves,
        host_of=case.host_of,
        plans=transfers,
        reference=(min(idle), max(idle), round(bound_s * full)),
        broadcast=GLOO if GLOO in case.peers else "",
        one_by_one=ONE_BY_ONE if ONE_BY_ONE in case.peers else "",
        repeat=repeat,
    )


def _against_bound(case: Case, times: Mapping[str, list[float]], load: float) -> list[Row]:
    plain = times["t"]
    t_spread = spread_of(plain)
    quiet = t_spread <= MAX_T_SPREAD and load <= MAX_LOAD
    found = []
    for name, runs in times.items():
        if name == "t":
            continue
        ratios = [run / t for run, t in zip(runs, plain, strict=True)]
        value = statistics.median(ratios)
        about = {"peer": name if name != OURS else None, "bound": 1.0, "spread": spread_of(ratios)}
        goal = case.goal if name == OURS and quiet else None
        found.append(at_most(f"{case.name}, {name}", value, "x bound", goal, **about))
    if not quiet:
        note = f"{case.name}: no verdict, t varied by {t_spread:.1%}, load {load:.1f}"
        found.append(Row(note, t_spread, "spread"))
    if ONE_BY_ONE in times:
        gain = statistics.median(a / b for a, b in zip(times[ONE_BY_ONE], times[OURS], strict=True))
        found.append(at_least(f"{case.name}: one by one over fused", gain, "ratio", 3.0, peer=ONE_BY_ONE))
    return found


def _nic_row(case: Case, work: Work, told: Sequence[Told]) -> Row:
    """Bytes over each NIC beside those of the plan: the largest excess counts."""
    plan = work.plans[OURS].plan
    worst = 0.0
    for rank, host in case.host_of.items():
        for way, carried in zip(("out", "in"), told[rank].nic[OURS], strict=True):
            planned = plan.nic_bytes.get((host, way), 0)
            # A NIC that the plan hardly uses carries answers and agreement.
            if planned > plan.busiest_nic_bytes / 10:
                worst = max(worst, carried / planned)
    return at_most(f"{case.name}: bytes over NICs, counted over planned", worst, "ratio", _PROTOCOL)
