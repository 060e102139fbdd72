"""Run the experiments of the elastic room; ``QUICK=1`` kills once per case, takes fewer steps and smaller jobs."""

from benchmarks.elastic import control_plane, overhead, recovery, shaped
from benchmarks.report import Row, is_quick, write_report


def all_rows(*, quick: bool) -> list[Row]:
    """Every experiment's."""
    found = overhead.rows(60 if quick else 300, 64) + recovery.rows(1 if quick else 20)
    found += control_plane.rows(quick=quick)
    if missing := shaped.why_not():
        print(f"left out: recovery on shaped links, which {missing}")
    else:
        found += shaped.rows(quick=quick)
    return found


if __name__ == "__main__":
    write_report("elastic", all_rows(quick=is_quick()))
