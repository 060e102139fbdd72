"""A program drawn by chance: ``at_random.py SEED STEPS [PAUSE_S] [--without KIND,...] [--only KIND,...]``.

All ranks derive the same steps from the seed, each of one of the kinds in ``random_kinds``. A step by itself cannot
deadlock, and all data are integers and bytes; so each rank's digest of all that it got is the same under every MPI and
at every speed. After each step a rank prints a line, so that two runs can be compared step by step:

    rank 1 step 17 messages.ring 5f0c9a1b
"""

from __future__ import annotations

import argparse
import random
import time

from mpi4py import MPI
from random_kinds import ALL
from random_kinds.state import State


def chosen(options: argparse.Namespace) -> list[str]:
    """The kinds to draw from; a kind, or all of a module by its name."""
    only, without = (set(filter(None, text.split(","))) for text in (options.only, options.without))
    return [
        name
        for name in ALL
        if (not only or {name, name.partition(".")[0]} & only) and not {name, name.partition(".")[0]} & without
    ]


def main() -> None:
    """Run the steps, then what they left open."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("pause_s", type=float, nargs="?", default=0.0, help="the longest pause of a rank between steps")
    parser.add_argument("--only", default="")
    parser.add_argument("--without", default="")
    options = parser.parse_args()
    names = chosen(options)
    weights = [ALL[name].weight for name in names]
    state = State(options.seed)
    own_pace = random.Random(f"{options.seed} {state.rank}")
    for number in range(options.steps):
        # A generator for each step: what one draws is the same whatever was drawn before.
        chance = random.Random(f"{options.seed} {number}")
        state.begin(number)
        [name] = chance.choices(names, weights)
        ALL[name].step(state, chance)
        print(f"rank {state.rank} step {number} {name} {state.digest.hexdigest()[:8]}", flush=True)
        time.sleep(options.pause_s * own_pace.random())
    state.end()
    digests = MPI.COMM_WORLD.gather(state.digest.hexdigest()[:16])
    if state.rank == 0:
        print("answer", *digests, flush=True)


if __name__ == "__main__":
    main()
