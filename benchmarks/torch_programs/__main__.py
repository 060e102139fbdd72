"""All experiments of the room; ``QUICK=1`` for fewer."""

from benchmarks.report import is_quick, write_report
from benchmarks.torch_programs import costs, rounds

if __name__ == "__main__":
    rows = costs.rows(turns=2 if is_quick() else 3)
    rows += rounds.rows(rounds.QUICK_SIZES if is_quick() else rounds.SIZES)
    write_report("torch_programs", rows)
