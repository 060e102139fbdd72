"""Run the experiments of the elastic room; ``QUICK=1`` kills once per case and takes fewer steps."""

from benchmarks.elastic import overhead, recovery
from benchmarks.report import is_quick, write_report

if __name__ == "__main__":
    quick = is_quick()
    write_report("elastic", overhead.rows(60 if quick else 300, 64) + recovery.rows(1 if quick else 5))
