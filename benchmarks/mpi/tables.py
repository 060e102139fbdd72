"""Turns reports into pages: ``python -m benchmarks.mpi.tables`` those of the matrix into ``matrix.md``;
``benchmarks.mpi.costs`` calls for ``measured.md`` itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.mpi.chain import ALL
from benchmarks.report import OUT, describe_value, header_of, verdict_of

_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "mpi"
_PAGE = _FOLDER / "matrix.md"
_BUSY = "**Other programs ran beside**: these values are no costs, only a proof that everything was run."
_SIGNS = {True: "=", False: "**x**", None: "·"}


def main() -> None:
    pairs = json.loads((OUT / "mpi_pairs.json").read_text())
    report = json.loads((OUT / "mpi_matrix.json").read_text())
    _PAGE.write_text(make_page(pairs, report))


def make_page(pairs: dict, report: dict) -> str:
    """The page as text."""
    by_language: dict[str, dict[str, bool]] = pairs["pairs"]
    seen = {pair: all(of.get(pair, True) for of in by_language.values()) for of in by_language.values() for pair in of}
    languages = ", ".join(f"{sum(of.values())} in {language}" for language, of in by_language.items())
    lines = [
        "# The matrix",
        "",
        header_of(report, "python -m benchmarks.mpi.matrix && python -m benchmarks.mpi.tables", "17 restarts a job"),
        "",
        "Each cell stands for three jobs of 4 ranks, a program in Python, one in C and one in Fortran, stopped in the",
        "row's configuration and restarted in the column's: `=` each gave the answer of an undisturbed run on a real",
        "MPI, `x` one did not, `·` not run. A job has 17 restarts, at moments drawn by chance.",
        "",
        "A [test](../../tests/mpi/test_tours.py) takes one program of each language once through all configurations.",
        "",
        f"Of {len(ALL) * (len(ALL) - 1)} ordered pairs are `=`: {languages}.",
        "",
        *_tell_busy(report),
        "| | configuration | " + " | ".join(str(number) for number in range(1, len(ALL) + 1)) + " |",
        "|---|---|" + "---|" * len(ALL),
    ]
    for number, before in enumerate(ALL, 1):
        cells = ["" if before == after else _SIGNS[seen.get(f"{before} -> {after}")] for after in ALL]
        lines.append(f"| {number} | {before} | " + " | ".join(cells) + " |")
    lines += ["", "| over all its checkpoints | value | goal |", "|---|---|---|"]
    for row in report["rows"]:
        goal = "" if row["goal"] is None else f"{row['goal']:g}"
        lines.append(f"| {row['case']} | {row['value']:.4g} {row['unit']} | {goal} |")
    return "\n".join(lines) + "\n"


def write_costs_page() -> None:
    """``measured.md`` from the report of the costs."""
    report = json.loads((OUT / "mpi_costs.json").read_text())
    (_FOLDER / "measured.md").write_text(make_costs_page(report))


def make_costs_page(report: dict) -> str:
    """The page as text."""
    lines = [
        "# What carrying a program costs",
        "",
        header_of(report, "python -m benchmarks.mpi.costs", "the median of interleaved turns"),
        "",
        "Native and carried runs of one program take",
        "turns on one host; values are differences or ratios of medians, bandwidths medians of the turns' ratios:",
        "loopback is several times slower at some times than at others, for native programs, too, as their own rows",
        "show (one cause: a copy whose ends differ by 1 to 15 bytes modulo a page takes nine times as long here).",
        "*Hosts at 10 and 1 Gbit/s* are two on this machine, one rank on each, joined by links of that rate, and the",
        "messages go one way in a row: loopback is as fast as memory, which no network is. *Shared arrays* are NumPy",
        "arrays with `REMESH_SHARED_ARRAYS=1`, *spinning* is `REMESH_SPIN=1`, measured where each of the four",
        "processes has a core of its own; see [costs](costs.md).",
        "",
        "Small calls, start and end, and memory are those of a program in C. Start and end are processor time of all",
        "processes together. Memory beside the program is that of its lower half, which has the MPI library in it, and",
        "its init. Where both halves of a rank share a core, a call that the lower half answers takes two switches.",
        "",
        "A *whole run* is the time that a program's steps took, as it says itself: GROMACS and LAMMPS of Debian, and",
        "two programs of ours in C that do what HPCG and LULESH do, on two ranks. A restart is that of a rank: MPI's",
        "start, the making of what the program had made of MPI, and the image. Intel MPI reads a table of the best",
        "collectives for a processor into memory, on some 20 MB: so it does in a native program, whose memory and",
        "whose time in MPI_Init are rows.",
        "",
        "A *bound* is what no way of carrying can beat on the MPI of the row, measured in the same run. Of a small",
        "call: the same message between native programs that may not block and take from anybody, as lower halves do,",
        "and two switches. Of MPI in a restart: the share if MPI took as long as MPI_Init of a native program.",
        "",
        *_tell_not_run(report.get("not_run", ())),
        *_tell_busy(report),
        "| case | value | bound | goal | |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        verdict = "" if row["goal"] is None else verdict_of(row)
        value, bound, goal = (_describe(row[name], row["unit"]) for name in ("value", "bound", "goal"))
        lines.append(f"| {row['case']} | {value} | {bound} | {goal} | {verdict} |")
    return "\n".join(lines) + "\n"


def _describe(value: float | None, unit: str) -> str:
    return "" if value is None else describe_value(value, unit)


def _tell_busy(report: dict) -> list[str]:
    return [_BUSY, ""] if report["load_before"][0] > report["machine"]["num_cores"] else []


def _tell_not_run(names: Sequence[str]) -> list[str]:
    """What is left out of a page, and what it needs."""
    if not names:
        return []
    return [f"**Not run**, for want of the programs (`make mpi-programs`): {', '.join(names)}.", ""]


if __name__ == "__main__":
    main()
