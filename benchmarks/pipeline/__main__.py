"""All experiments of the room; ``QUICK=1`` for the smaller set."""

from __future__ import annotations

from benchmarks.pipeline import simulated
from benchmarks.report import is_quick, write_report


def main() -> None:
    write_report("pipeline", simulated.rows(quick=is_quick()), seed=simulated.SEED)


if __name__ == "__main__":
    main()
