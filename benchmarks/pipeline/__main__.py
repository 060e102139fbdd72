"""All experiments of the room; ``QUICK=1`` for the smaller set, ``MODELS=1`` for the models too, on a quiet machine."""

import os

from benchmarks.pipeline import measured, simulated
from benchmarks.report import is_quick, write_report
from benchmarks.reshard.netns import why_not

if __name__ == "__main__":
    rows = simulated.rows(quick=is_quick())
    if reason := why_not():
        print(f"testbed: skipped, {reason}")
    else:
        rows += measured.rows(quick=is_quick(), models=os.environ.get("MODELS", "") == "1")
    write_report("pipeline", rows, seed=simulated.SEED)
