"""All experiments of the room; ``QUICK=1`` for the smaller set, ``DEVICES=4`` for the paper's devices per host."""

from __future__ import annotations

import os

from benchmarks.report import is_quick, write_report
from benchmarks.reshard import ablation, loopback, netns, planning
from remesh.testing.pool import RankPool


def main() -> None:
    quick = is_quick()
    rows = planning.table_2()
    rows += planning.random_specs(60 if quick else 250)
    rows += ablation.rows(60 if quick else 250)
    rows += planning.state_dict(200)
    rows += planning.many_devices(16 if quick else 128)
    if not quick:
        rows += planning.many_devices(1024)
    with RankPool() as pool:
        rows += loopback.rows(pool, num_rows=(8 if quick else 32) << 10, num_tensors=200, repeat=5)
    if reason := netns.why_not():
        print(f"netns: skipped, {reason}")
    else:
        rows += netns.rows(quick=quick, num_devices=int(os.environ.get("DEVICES", "2")))
    write_report("reshard", rows, seed=planning.SEED)


if __name__ == "__main__":
    main()
