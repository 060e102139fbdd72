"""No decision depends on the wall clocks of two hosts: times between events are taken on one clock."""

import re

from tests.rules.source_tree import modules

# For people to read, and for file names; nothing is decided by them.
_FOR_PEOPLE = {"remesh.elasticity.telemetry.events", "remesh.elasticity.telemetry.metrics"}
_WALL_CLOCK = re.compile(r"\btime\.time\(|\bdatetime\b.*\bnow\(|\butcnow\(")


def test_agents_and_workers_read_no_wall_clock() -> None:
    found = [
        module.name
        for module in modules()
        if module.room == "elastic" and module.name not in _FOR_PEOPLE and _WALL_CLOCK.search(module.text)
    ]
    assert not found, "a clock that only moves forward (time.monotonic), and the order in the store, decide"
