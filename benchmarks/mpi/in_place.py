"""Small calls of the real MPI in the program's own process, beside native runs and beside two processes a rank.

``python -m benchmarks.mpi.in_place [MPI:NETWORK ...]`` (``QUICK=1`` for fewer turns). The three ways take turns, on two
ranks; each value is a difference or ratio of medians over the turns.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.mpi.c_programs import CCase, Measured, compile_program, library_folder, run_carried, run_native
from benchmarks.mpi.costs import ONE_HOST
from benchmarks.report import Row, at_most, is_quick, spread_of, write_report
from remesh.carried.mpi.in_place.halves import build_lower_mpi, build_upper
from remesh.carried.mpi.mpis import find_mpi

_SOURCE: Final = Path(__file__).with_name("in_place.c")
_ADDED_US: Final = 0.15
_RATIO: Final = 1.05
_REPEAT: Final = 2000
_NAMES: Final = ("latency", "allreduce")


def rows(repeat: int, turns: int, networks: Iterable[tuple[str, str]]) -> list[Row]:
    """Rows of every MPI and network, on one host."""
    found = []
    with tempfile.TemporaryDirectory(prefix="remesh-in-place-") as folder:
        upper = build_upper(Path(folder, "upper"), _SOURCE)
        for mpi, network in networks:
            installation = find_mpi(mpi)
            face = "openmpi" if mpi == "openmpi" else "mpich"
            lower = build_lower_mpi(face, Path(folder, f"lower-{mpi}"))
            native = CCase(installation, network, compile_program(installation, Path(folder, mpi)), 2, (str(repeat),))
            arguments = (str(lower), str(library_folder(installation)), str(repeat))
            in_place = replace(native, program=upper, arguments=arguments)
            runs: dict[str, list[Measured]] = {"native": [], "in place": [], "beside": []}
            for _ in range(turns):
                runs["native"].append(run_native(native))
                runs["in place"].append(run_native(in_place))
                runs["beside"].append(run_carried(native))
            found += compare(native.name, runs)
    return found


def compare(case: str, runs: dict[str, list[Measured]]) -> list[Row]:
    """Rows of one MPI and network."""
    found = []
    for name in _NAMES:
        said = f"{case}: {name} of 8 bytes"
        native, in_place, beside = (sorted(run[name] for run in runs[way])[len(runs[way]) // 2] for way in runs)
        spread = spread_of([run[name] for run in runs["in place"]])
        found += [
            Row(f"{said}, native", native * 1e6, "us"),
            at_most(f"{said}, added in place", (in_place - native) * 1e6, "us", _ADDED_US, spread=spread),
            at_most(f"{said}, in place", in_place / native, "ratio", _RATIO, peer="native"),
            Row(f"{said}, added with two processes a rank", (beside - native) * 1e6, "us"),
        ]
    stepping, blocking = (
        sorted(run[name] for run in runs["in place"])[len(runs["in place"]) // 2] for name in ("stepping", "latency")
    )
    said = f"{case}: latency of 8 bytes in place, added by receives that a cut may ask to step out"
    found.append(Row(said, (stepping - blocking) * 1e6, "us"))
    loading = [run["loading"] for run in runs["in place"]]
    return [*found, Row(f"{case}: loading a lower half", sorted(loading)[len(loading) // 2], "s")]


def main(arguments: list[str]) -> None:
    """Measure and write the report."""
    networks = [(mpi, network) for mpi, _, network in (each.partition(":") for each in arguments)] or ONE_HOST
    turns = 3 if is_quick() else 7
    write_report("mpi_in_place", rows(_REPEAT, turns, networks))


if __name__ == "__main__":
    main(sys.argv[1:])
