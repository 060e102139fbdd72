"""Every ordered pair of configurations is restarted once, and random chains are walked; every answer must be the same.

``python -m benchmarks.transparent.matrix [number of segments]``. The pairs stand on one closed walk, which is cut into
segments; each is the life of one job, with one of the programs.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

from benchmarks.report import OUT, Row, at_least, describe_run, write_report
from benchmarks.transparent.chain import ALL, Config, Walk, all_pairs_walk, native_answer, run_chain

SEED = 4
SEGMENT = 17
"""Restarts of one job."""
PROGRAMS = {"ring": (700, 0.01), "jacobi": (600, 0.01), "cg": (500, 0.01), "fft": (500, 0.01), "master": (1600, 0.01)}
"""Steps and pauses: long enough for a whole segment."""


def segments() -> list[list[Config]]:
    """The walk over all pairs, cut so that neighbours share their end."""
    walk = all_pairs_walk(ALL)
    return [walk[start : start + SEGMENT + 1] for start in range(0, len(walk) - 1, SEGMENT)]


def random_chains(count: int, length: int) -> list[list[Config]]:
    """Chains over configurations drawn by chance."""
    chance = random.Random(SEED)
    return [[chance.choice(ALL) for _ in range(length + 1)] for _ in range(count)]


def main(arguments: list[str]) -> None:
    limit = int(arguments[0]) if arguments else None
    jobs = [("pairs", each) for each in segments()] + [("random", each) for each in random_chains(3, 20)]
    expected: dict[str, str] = {}
    done: list[tuple[str, str, Walk]] = []
    for number, (kind, configs) in enumerate(jobs[:limit]):
        program = list(PROGRAMS)[number % len(PROGRAMS)]
        steps, pause_s = PROGRAMS[program]
        if program not in expected:
            expected[program] = native_answer(program, steps)
        walk = run_chain(program, steps, pause_s, configs, seed=SEED + number)
        good = walk.answer == expected[program]
        done.append((kind, program, walk))
        restarts = len(walk.cut_s)
        print(
            f"{number:3d} {kind:6} {program:7} {restarts:3d} restarts {'same answer' if good else 'BROKEN'}", flush=True
        )
        if not good:
            print(f"    expected {expected[program]}, found {walk.answer!r}; {walk.cause}", flush=True)
        # After each job: an interrupted run tells what it has seen.
        write(done, expected)


def write(done: list[tuple[str, str, Walk]], expected: dict[str, str]) -> None:
    """Rows for the report, and every pair for the documentation."""
    pairs: dict[str, bool] = {}
    caught: Counter[str] = Counter()
    good_restarts = restarts = 0
    cuts: list[float] = []
    for kind, program, walk in done:
        good = walk.answer == expected[program]
        count = len(walk.cut_s)
        restarts += count
        good_restarts += count if good else 0
        caught.update(walk.caught)
        cuts += walk.cut_s
        if kind == "pairs":
            for before, after in zip(walk.configs[: count + 1], walk.configs[1 : count + 1], strict=False):
                pairs[f"{before} -> {after}"] = good
    cuts.sort()
    rows = [
        at_least("restarts with the answer of an uninterrupted run", good_restarts / max(restarts, 1), "share", 1.0),
        at_least("ordered pairs of configurations that were restarted", sum(pairs.values()), "pairs", 180),
        Row("quiesce and drain, median", cuts[len(cuts) // 2] if cuts else 0.0, "s"),
        Row("quiesce and drain, nine of ten", cuts[len(cuts) * 9 // 10] if cuts else 0.0, "s"),
        *(at_least(f"caught: {what}", count, "times", 1) for what, count in sorted(caught.items())),
    ]
    write_report("transparent_matrix", rows, seed=SEED)
    path = Path(OUT) / "transparent_pairs.json"
    path.write_text(json.dumps({**describe_run(SEED), "pairs": pairs}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
