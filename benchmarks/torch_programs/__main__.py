"""All experiments of the room; ``QUICK=1`` for fewer. ``--page`` writes docs/torch_programs/measured.md as well."""

from __future__ import annotations

import sys

from benchmarks.report import is_quick, write_report
from benchmarks.torch_programs import costs, rounds


def main() -> None:
    rows = costs.rows(turns=2 if is_quick() else 3)
    rows += rounds.rows(rounds.QUICK_SIZES if is_quick() else rounds.SIZES)
    write_report("torch_programs", rows)
    if "--page" in sys.argv[1:]:
        costs.write_page(rows)


if __name__ == "__main__":
    main()
