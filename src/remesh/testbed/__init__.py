"""Hosts on one machine: network namespaces with shaped links, for tests and benchmarks of everything that crosses them.

Needs root and iproute2; importing it needs neither, nor torch.
"""

from remesh.testbed.bed import NicBytes, Testbed
from remesh.testbed.spec import BedSpec, HostSpec, describe_rate, parse_rate
from remesh.testing.pool import RankRun, RanksFailed

__all__ = ["BedSpec", "HostSpec", "NicBytes", "RankRun", "RanksFailed", "Testbed", "describe_rate", "parse_rate"]
