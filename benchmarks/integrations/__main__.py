"""All experiments of the room; ``QUICK=1`` for the smaller set. Hosts that are not installed are left out, by name."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.integrations import saves, sync
from benchmarks.report import is_quick, write_report
from benchmarks.reshard.netns import why_not


def main() -> None:
    quick = is_quick()
    rows = []
    if reason := why_not():
        print(f"sync: left out, {reason}")
    else:
        rows += sync.rows(sync.Sizes(num_layers=4 if quick else 16, repeat=3 if quick else 5))
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        for host in saves.hosts_here():
            rows += saves.rows_of(host, Path(folder).resolve(), 48 if quick else 96, 1 if quick else 2)
    write_report("integrations", rows, seed=0)


if __name__ == "__main__":
    main()
