"""All experiments of the room; ``QUICK=1`` for the smaller set, ``MODELS=1`` for the models too, on a quiet machine."""

from __future__ import annotations

import os

from benchmarks.pipeline import measured, simulated
from benchmarks.report import is_quick, write_report


def main() -> None:
    quick = is_quick()
    rows = simulated.rows(quick=quick)
    if reason := measured.why_not():
        print(f"testbed: skipped, {reason}")
    else:
        rows += measured.rows(quick=quick, models=os.environ.get("MODELS", "") == "1")
    write_report("pipeline", rows, seed=simulated.SEED)


if __name__ == "__main__":
    main()
