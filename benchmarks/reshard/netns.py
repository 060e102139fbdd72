"""How near to the bound are moves on a real network? Hosts with shaped links on this machine, real TCP, real bytes.

A case's value is the time of a move over ``t``, the time that a plain gloo send and receive of the bound's bytes takes
between two idle hosts of the case; the median over runs that take turns. Nothing can beat 1. Beside it stand what the
paper proposes and what others do. When ``t`` itself varies, or the machine is busy, a row has no goal: it says nothing.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Sequence

from benchmarks.report import Row, at_least, at_most
from benchmarks.reshard.netns_cases import GLOO, MIB, ONE_BY_ONE, Case, all_cases, quick_cases
from benchmarks.reshard.netns_ranks import Told, Work, measure
from remesh.reshard import plan_reshard
from remesh.reshard.model.network import HostLink, Network
from remesh.testbed import BedSpec, HostSpec, Testbed, parse_rate

RATE = "100mbit"
"""Of every link: slow enough that two cores move the bytes of six hosts, and little besides the network counts."""
OURS = "remesh"
_MAX_T_SPREAD = 0.03
_MAX_LOAD = 2.0
_PROTOCOL = 1.07
"""Headers of Ethernet, IP and TCP add 4.6 % to full packets; what goes the other way is acknowledged, with up to 2.3 %;
ranks agree before they begin."""
_TIMEOUT_S = 600.0


def why_not() -> str:
    """What this machine lacks for a testbed; empty when it lacks nothing."""
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"needs {' and '.join(absent)}, not on the path"
    return "" if os.geteuid() == 0 else "needs root, for network namespaces"


def rows(*, quick: bool, num_devices: int = 2) -> list[Row]:
    """All rows of the testbed; ``num_devices`` on each host where the paper has four."""
    cases = quick_cases(8 * MIB, num_devices) if quick else all_cases(16 * MIB, num_devices)
    return [row for case in cases for row in rows_of(case)]


def rows_of(case: Case, *, rate: str = RATE, repeat: int = 3) -> list[Row]:
    """The rows of one case: ours, its peers, the bytes over the NICs."""
    rate_bytes_per_s = parse_rate(rate)
    assert rate_bytes_per_s is not None
    network = Network({host: HostLink(rate_bytes_per_s * case.rate_of.get(host, 1.0)) for host in case.ranks_per_host})
    work = work_of(case, network, repeat)
    hosts = [HostSpec(host, network.hosts[host].rate_bytes_per_s) for host in case.ranks_per_host]
    with Testbed(BedSpec(tuple(hosts))) as bed:
        told: list[Told] = bed.run(measure, case.ranks_per_host, (work,), timeout_s=_TIMEOUT_S)
    times = {
        name: [max(run) for run in zip(*(each.seconds[name] for each in told), strict=True)] for name in told[0].seconds
    }
    return [*_against_bound(case, times), _nic_row(case, work, told)]


def work_of(case: Case, network: Network, repeat: int) -> Work:
    """Plans of all contestants of a case, and the plain message that takes as long as its bound."""
    plans = {OURS: plan_reshard(case.moves, case.host_of, network=network)}
    for peer in case.peers:
        if peer not in (GLOO, ONE_BY_ONE):
            plans[peer] = plan_reshard(case.moves, case.host_of, network=network, strategy=peer)
    bound_s = plans[OURS].lower_bound_s
    assert bound_s is not None
    full = max(link.rate_bytes_per_s for link in network.hosts.values())
    first = {host: rank for rank, host in sorted(case.host_of.items(), reverse=True)}
    idle = [rank for host, rank in first.items() if network.hosts[host].rate_bytes_per_s == full]
    return Work(
        moves=case.moves,
        host_of=case.host_of,
        plans=plans,
        reference=(min(idle), max(idle), round(bound_s * full)),
        broadcast=GLOO if GLOO in case.peers else "",
        one_by_one=ONE_BY_ONE if ONE_BY_ONE in case.peers else "",
        repeat=repeat,
    )


def _against_bound(case: Case, times: dict[str, list[float]]) -> list[Row]:
    plain = times.pop("t")
    t_spread = _spread(plain)
    quiet = t_spread <= _MAX_T_SPREAD and os.getloadavg()[0] <= _MAX_LOAD
    found = []
    for name, runs in times.items():
        ratios = [run / t for run, t in zip(runs, plain, strict=True)]
        value = statistics.median(ratios)
        about = {"peer": name if name != OURS else None, "bound": 1.0, "spread": _spread(ratios)}
        if name == OURS and quiet:
            found.append(at_most(f"{case.name}, {name}", value, "x bound", case.goal, **about))
        else:
            found.append(Row(f"{case.name}, {name}", value, "x bound", **about))
    if not quiet:
        note = f"{case.name}: no verdict, t varied by {t_spread:.1%}, load {os.getloadavg()[0]:.1f}"
        found.append(Row(note, t_spread, "spread"))
    if ONE_BY_ONE in times:
        gain = statistics.median(a / b for a, b in zip(times[ONE_BY_ONE], times[OURS], strict=True))
        found.append(at_least(f"{case.name}: one by one over fused", gain, "ratio", 3.0, peer=ONE_BY_ONE))
    return found


def _nic_row(case: Case, work: Work, told: Sequence[Told]) -> Row:
    """Bytes over each NIC beside those of the plan: the largest excess counts."""
    plan = work.plans[OURS]
    worst = 0.0
    for rank, host in case.host_of.items():
        for way, carried in zip(("out", "in"), told[rank].nic[OURS], strict=True):
            planned = plan.nic_bytes.get((host, way), 0)
            # A NIC that the plan hardly uses carries answers and agreement.
            if planned > plan.busiest_nic_bytes / 10:
                worst = max(worst, carried / planned)
    return at_most(f"{case.name}: bytes over NICs, counted over planned", worst, "ratio", _PROTOCOL)


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values) - 1
