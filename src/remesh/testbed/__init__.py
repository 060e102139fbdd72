"""Hosts on one machine: network namespaces with shaped links, for tests and benchmarks of everything that crosses them.

Needs root and iproute2; importing it needs neither, nor torch. Names are resolved at first use:
most jobs run on hosts that are there.
"""

from typing import TYPE_CHECKING, Any

from remesh.first_use import attribute_at_home

if TYPE_CHECKING:
    from remesh.testbed.bed import NicBytes, Testbed
    from remesh.testbed.spec import BedSpec, HostSpec, describe_rate, parse_rate
    from remesh.testing.pool import RankRun, RanksFailed

__all__ = ["BedSpec", "HostSpec", "NicBytes", "RankRun", "RanksFailed", "Testbed", "describe_rate", "parse_rate"]

_HOMES = {
    "BedSpec": "remesh.testbed.spec",
    "HostSpec": "remesh.testbed.spec",
    "NicBytes": "remesh.testbed.bed",
    "RankRun": "remesh.testing.pool",
    "RanksFailed": "remesh.testing.pool",
    "Testbed": "remesh.testbed.bed",
    "describe_rate": "remesh.testbed.spec",
    "parse_rate": "remesh.testbed.spec",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        return attribute_at_home(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
