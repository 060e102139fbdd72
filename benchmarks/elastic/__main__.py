"""Run the experiments of the elastic room, or those that are named: ``python -m benchmarks.elastic plane costs``.

``QUICK=1`` kills once per case, takes fewer steps and smaller jobs.
"""

import sys
from collections.abc import Callable, Sequence

from benchmarks.elastic import control_plane, overhead, recovery, shaped
from benchmarks.report import Row, is_quick, write_report


def _on_shaped_links(quick: bool) -> list[Row]:
    if missing := shaped.why_not():
        print(f"left out: recovery on shaped links, which {missing}")
        return []
    return shaped.rows(quick=quick)


EXPERIMENTS: dict[str, Callable[[bool], list[Row]]] = {
    "costs": lambda quick: overhead.rows(60 if quick else 300, 64),
    "recovery": lambda quick: recovery.rows(1 if quick else 20),
    "plane": lambda quick: control_plane.rows(quick=quick),
    "shaped": _on_shaped_links,
}


def main(names: Sequence[str]) -> None:
    """Run these experiments, all of them when none is named, and write the report."""
    rows: list[Row] = []
    for name in names or EXPERIMENTS:
        rows += EXPERIMENTS[name](is_quick())
        # After each, so that what was measured is kept when a later one is stopped.
        write_report("elastic", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
