"""Growth of planning with the number of ranks: the same moves on ever larger meshes.

``python -m benchmarks.reshard.scale`` writes the report of docs/reshard/scale.md; about a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.report import Row, write_report
from benchmarks.reshard.planning import PAIRS, pair_of_halves, timed
from remesh.resharding import Plan, plan_reshard

RANKS = tuple(1 << power for power in range(3, 14))


def rows(ranks: Sequence[int] = RANKS, repeat: int = 3) -> list[Row]:
    """Least seconds of processor time to plan each of the moves, and how many messages its largest plan has."""
    found = []
    for src, dst in PAIRS:
        for num_ranks in ranks:
            # Eight devices on a host, and at least two hosts.
            num_hosts = max(2, num_ranks // 8)
            move, hosts = pair_of_halves(src, dst, num_hosts, num_ranks // num_hosts)
            act: Callable[[], Plan] = partial(plan_reshard, [move], hosts)
            seconds, plan = timed(act, repeat, time.thread_time)
            found.append(Row(f"planning {src} to {dst}: {num_ranks} ranks", seconds, "s"))
        found.append(Row(f"planning {src} to {dst}: messages", len(plan.messages), "messages"))
    return found


if __name__ == "__main__":
    write_report("reshard-scale", rows())
