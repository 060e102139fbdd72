"""All experiments of the room but the matrix (``python -m benchmarks.mpi.matrix``); ``QUICK=1`` for fewer.

What carrying a program costs comes first, and its page is written then; images follow.
"""

from __future__ import annotations

from benchmarks.mpi import costs, engine, images
from benchmarks.report import is_quick, write_report


def main() -> None:
    quick = is_quick()
    costs.main([])
    rows = images.rows(64 if quick else 256, repeat=3 if quick else 5)
    rows += images.object_rows()
    rows += engine.rows(num_mib=64 if quick else 256, repeat=3 if quick else 7)
    write_report("mpi", rows)


if __name__ == "__main__":
    main()
