"""Run the experiments of the elastic room; ``QUICK=1`` kills once per case."""

from benchmarks.elastic.recovery import rows
from benchmarks.report import is_quick, write_report

if __name__ == "__main__":
    write_report("elastic", rows(1 if is_quick() else 5))
