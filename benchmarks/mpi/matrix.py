"""Every ordered pair of configurations is restarted once in each language, and random chains are walked.

``python -m benchmarks.mpi.matrix [K/N] [C Fortran Python random]``: all of it, the K-th of N parts, or jobs of some
kinds; they join those that were run on the same commit. Every answer must be that of a native run. The pairs stand on
one closed walk, which is cut into segments; each is the life of one job, with one of the programs
(`benchmarks.mpi.matrix_programs`).
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.mpi.chain import ALL, Config, Walk, all_pairs_walk, run_command
from benchmarks.mpi.matrix_programs import Program, make_programs
from benchmarks.report import OUT, Row, at_least, find_commit, save_report

SEED = 4
SEGMENT = 17
"""Restarts of one job."""
RANDOM = "random"
"""Kind of the jobs that do not belong to the walk over the pairs; the others have that of their language."""
_KINDS = ("Python", "C", "Fortran", RANDOM)
_REPORT = "mpi_matrix"
"""It has what jobs came to, of all parts that were run on one commit."""


def segments() -> list[list[Config]]:
    """The walk over all pairs, cut so that neighbours share their end."""
    walk = all_pairs_walk(ALL)
    return [walk[start : start + SEGMENT + 1] for start in range(0, len(walk) - 1, SEGMENT)]


def random_chains(count: int, length: int) -> list[list[Config]]:
    """Chains over configurations drawn by chance."""
    chance = random.Random(SEED)
    return [[chance.choice(ALL) for _ in range(length + 1)] for _ in range(count)]


def jobs(programs: dict[str, list[Program]]) -> list[tuple[str, Program, list[Config]]]:
    """Kind, program and configurations of every job: each language walks over all pairs."""
    found = []
    for language, of_language in programs.items():
        turns = itertools.cycle(of_language)
        found += [(language, next(turns), each) for each in segments()]
    turns = itertools.cycle(one[-1] for one in programs.values())
    return found + [(RANDOM, next(turns), each) for each in random_chains(3, 20)]


def main(arguments: list[str], folder: Path = OUT) -> None:
    """Run the jobs of a part; the report is written after each, so that an interrupted run tells what it has seen."""
    parts, kinds = [each for each in arguments if "/" in each], [each for each in arguments if "/" not in each]
    if unknown := {*kinds} - {*_KINDS}:
        raise SystemExit(f"jobs of kind {', '.join(sorted(unknown))}: expected {', '.join(_KINDS)}")
    part, num_parts = map(int, parts[0].split("/")) if parts else (1, 1)
    told = read_jobs(folder)
    # By the command of the native run: programs of several faces have one.
    answers: dict[tuple[str, ...], str] = {}
    with tempfile.TemporaryDirectory(prefix="remesh-matrix-") as built:
        for number, (kind, program, configs) in enumerate(jobs(make_programs(Path(built)))):
            if number % num_parts != part - 1 or (kinds and kind not in kinds):
                continue
            began_s = time.monotonic()
            command = program.natively[0]
            expected = answers[command] = answers.get(command) or program.native_answer()
            walk = run_command(program.argv, program.environment, configs, SEED + number)
            told[number] = tell(kind, walk, good=walk.answer == expected)
            verdict = "same answer" if told[number]["good"] else "BROKEN"
            took = f"{time.monotonic() - began_s:4.0f} s"
            print(f"{number:3d} {kind:7} {program.name:21} {len(walk.cut_s):3d} restarts {took} {verdict}", flush=True)
            if not told[number]["good"]:
                print(f"    expected {expected}, found {walk.answer!r}; {walk.cause}", flush=True)
            write(told, folder)


def tell(kind: str, walk: Walk, *, good: bool) -> dict[str, Any]:
    """What the report needs of a job, as JSON."""
    return {
        "kind": kind,
        "good": good,
        "configs": [str(config) for config in walk.configs[: len(walk.cut_s) + 1]],
        "caught": dict(walk.caught),
        "cut_s": list(walk.cut_s),
    }


def read_jobs(folder: Path) -> dict[int, dict[str, Any]]:
    """By number, the jobs that were run on this commit."""
    path = folder / f"{_REPORT}.json"
    report = json.loads(path.read_text()) if path.exists() else {"commit": None, "jobs": {}}
    return {int(number): job for number, job in report["jobs"].items()} if report["commit"] == find_commit() else {}


def pairs_of(jobs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, bool]]:
    """By language, the ordered pairs that were walked, and whether the job's answer was right."""
    pairs: dict[str, dict[str, bool]] = {}
    for job in jobs:
        if job["kind"] != RANDOM:
            walked = {f"{before} -> {after}": job["good"] for before, after in itertools.pairwise(job["configs"])}
            pairs.setdefault(job["kind"], {}).update(walked)
    return pairs


def write(jobs: Mapping[int, Mapping[str, Any]], folder: Path) -> None:
    """The report: rows over all jobs, and the jobs themselves."""
    caught: Counter[str] = Counter()
    for job in jobs.values():
        caught.update(job["caught"])
    pairs = pairs_of(jobs.values())
    cuts = sorted(cut_s for job in jobs.values() for cut_s in job["cut_s"])
    num_good = sum(len(job["cut_s"]) for job in jobs.values() if job["good"])
    rows = [
        at_least("restarts with the answer of an uninterrupted run", num_good / max(len(cuts), 1), "share", 1.0),
        *(
            at_least(f"ordered pairs of configurations, program in {language}", sum(good.values()), "pairs", 306)
            for language, good in pairs.items()
        ),
        Row("quiesce and drain, median", cuts[len(cuts) // 2] if cuts else 0.0, "s"),
        Row("quiesce and drain, nine of ten", cuts[len(cuts) * 9 // 10] if cuts else 0.0, "s"),
        *(at_least(f"caught: {what}", count, "times", 1) for what, count in sorted(caught.items())),
        *(
            at_least(f"pair {pair}", float(all(of.get(pair, True) for of in pairs.values())), "right", 1.0)
            for pair in (f"{before} -> {after}" for before, after in itertools.permutations(ALL, 2))
            if any(pair in of for of in pairs.values())
        ),
    ]
    save_report(_REPORT, [asdict(row) for row in rows], SEED, folder, jobs=jobs)


if __name__ == "__main__":
    main(sys.argv[1:])
