"""Hosts on one machine: network namespaces with shaped links, for tests and benchmarks of everything that crosses them.

Needs root and iproute2; importing it needs neither, nor torch. Names are resolved at first use:
most jobs run on hosts that are there.
"""

from typing import TYPE_CHECKING

from remesh.foundation.first_use import names_at_first_use

if TYPE_CHECKING:
    from remesh.testbed.bed import NicBytes as NicBytes, Testbed as Testbed
    from remesh.testbed.pool import RankRun as RankRun, RanksFailed as RanksFailed
    from remesh.testbed.testbed_spec import (
        BedSpec as BedSpec,
        HostSpec as HostSpec,
        describe_rate as describe_rate,
        parse_rate as parse_rate,
    )
else:
    __getattr__, __dir__ = names_at_first_use(__name__)
