"""Run the experiments of the layout room; ``QUICK=1`` leaves out 16,384 ranks."""

from benchmarks.layout.overlap import against_comparing_all, building, overlaps, small_tensors
from benchmarks.report import is_quick, write_report

rows = small_tensors(200) + overlaps(32) + against_comparing_all(16) + building(32)
if not is_quick():
    rows += overlaps(128) + building(128)
write_report("layout", rows)
