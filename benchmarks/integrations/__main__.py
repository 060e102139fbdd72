"""All experiments of the room, or those that are named: ``python -m benchmarks.integrations sync lightning``.

``QUICK=1`` for the smaller set. Rows are written as they come; with ``KEEP=1`` those of experiments that were not asked
for stay. Hosts that are not installed are left out, by name.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.integrations import saves, sync
from benchmarks.report import Journal, Row, is_kept, is_quick, print_rows
from benchmarks.reshard.netns import why_not


def main() -> None:
    quick = is_quick()
    parts = sys.argv[1:] or ["sync", *saves.HOSTS]
    journal = Journal("integrations", 0, keeps=is_kept())

    def add(rows: Sequence[Row]) -> None:
        print_rows(rows)
        journal.add(rows)

    if "sync" in parts:
        if reason := why_not():
            print(f"sync: left out, {reason}")
        else:
            add(sync.rows(sync.Sizes(num_layers=4 if quick else 16, repeat=3 if quick else 5)))
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        for host in saves.hosts_here():
            if host in parts:
                add(saves.rows_of(host, Path(folder).resolve(), 48 if quick else 96, 1 if quick else 2))


if __name__ == "__main__":
    main()
