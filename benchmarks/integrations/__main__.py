"""All experiments of the room, or those that are named: ``python -m benchmarks.integrations sync lightning``.

``QUICK=1`` for the smaller set. Rows are written as they come; those of experiments that were not asked for stay. Hosts
that are not installed are left out, by name.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.integrations import saves, sync
from benchmarks.report import OUT, Row, is_quick, print_rows, save_report
from benchmarks.reshard.netns import why_not

_ROOM = "integrations"


def main() -> None:
    quick = is_quick()
    parts = sys.argv[1:] or ["sync", *saves.HOSTS]
    if "sync" in parts:
        if reason := why_not():
            print(f"sync: left out, {reason}")
        else:
            _keep("sync", sync.rows(sync.Sizes(num_layers=4 if quick else 16, repeat=3 if quick else 5)))
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        for host in saves.hosts_here():
            if host in parts:
                _keep(host, saves.rows_of(host, Path(folder).resolve(), 48 if quick else 96, 1 if quick else 2))


def _keep(part: str, rows: Sequence[Row]) -> None:
    """Put rows in the place of those that the report has of this experiment."""
    print_rows(rows)
    path = OUT / f"{_ROOM}.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    others = [row for row in before if not row["case"].startswith(part)]
    save_report(_ROOM, [*others, *map(asdict, rows)], seed=0)


if __name__ == "__main__":
    main()
