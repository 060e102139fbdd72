"""Programs in C from a seed: steps of every group of functions, in an order and with arguments that chance draws.

Each rank prints a digest of what it got in each step. What it should be says a real MPI, which runs the same program.
``python -m tests.mpi.random_programs SEED STEPS`` prints a program.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PRELUDE: Final = (Path(__file__).parent / "programs" / "c" / "random_memory.h").name
_OPS: Final = ("MPI_SUM", "MPI_MAX", "MPI_MIN", "MPI_BXOR", "MPI_BAND", "first_odd")
_FORMS: Final = ("blocking", "started", "persistent")
_MOST: Final = 3000
"""Elements of a message."""


@dataclass(frozen=True)
class _Draw:
    """What steps draw from."""

    chance: random.Random

    def count(self) -> int:
        return self.chance.randrange(1, self.chance.choice((2, 20, 500, _MOST)))

    def comm(self) -> str:
        """An expression for one that is there from the beginning, or made for the step."""
        made = f"split({self.chance.randrange(1, 4)}, {self.chance.choice((-1, 1))})"
        return self.chance.choice(("MPI_COMM_WORLD", "copy", "ring", made, "reversed()", "shared()"))


def write_program(seed: int, steps: int) -> str:
    """The source; it is compiled beside ``programs/c``."""
    draw = _Draw(random.Random(f"program {seed}"))
    bodies = [draw.chance.choice(_KINDS)(draw) for _ in range(steps)]
    lines = [f'#include "{_PRELUDE}"', "", "int main(int argc, char **argv) {", f"    begin(argc, argv, {seed});"]
    for number, body in enumerate(bodies):
        lines += [f"    begin_step({number});", f"    {body}", "    end_step();"]
    return "\n".join([*lines, "    return end();", "}", ""])


def _collective(draw: _Draw) -> str:
    name = draw.chance.choice(("allreduce", "scan", "exscan", "reduce_scatter_block", "alltoall", "allgather", "bcast"))
    root = draw.chance.randrange(64)
    form = draw.chance.choice(_FORMS).upper()
    return f"collective({name.upper()}, {form}, {draw.comm()}, {draw.count()}, {draw.chance.choice(_OPS)}, {root});"


def _uneven(draw: _Draw) -> str:
    return f"uneven({draw.chance.choice(_FORMS).upper()}, {draw.comm()}, {draw.count()});"


def _intercomm(draw: _Draw) -> str:
    return f"between_groups({draw.count()}, {draw.chance.choice(_OPS)});"


def _topology(draw: _Draw) -> str:
    shifts = sorted({draw.chance.randrange(1, 8) for _ in range(draw.chance.randrange(1, 4))})
    listed = ", ".join(map(str, shifts))
    return f"neighbours({draw.comm()}, {draw.count()}, {len(shifts)}, (int[]){{{listed}}});"


def _window(draw: _Draw) -> str:
    kind = draw.chance.choice(("ALLOCATED", "CREATED", "SHARED"))
    epoch = draw.chance.choice(("FENCES", "LOCKS", "PARTNERS"))
    return f"window({kind}, {epoch}, {draw.chance.randrange(1, 200)}, {draw.chance.randrange(1, 8)});"


def _file(draw: _Draw) -> str:
    access = draw.chance.choice(("AT", "AT_ALL", "ORDERED", "VIEWED"))
    return f"file_of_all({access}, {draw.comm()}, {draw.count()});"


def _persistent(draw: _Draw) -> str:
    shift, turns = draw.chance.randrange(1, 8), draw.chance.randrange(1, 4)
    parts = draw.chance.randrange(0, 5)  # 0: not partitioned
    return f"repeated({draw.comm()}, {draw.count()}, {shift}, {turns}, {parts});"


def _on_a_comm(name: str) -> Callable[[_Draw], str]:
    """A step that draws the rest of its arguments itself, alike on all ranks."""
    return lambda draw: f"{name}({draw.comm()}, {draw.chance.getrandbits(63)}u);"


def _of_all(name: str) -> Callable[[_Draw], str]:
    return lambda draw: f"{name}({draw.chance.getrandbits(63)}u);"


_KINDS: Final[tuple[Callable[[_Draw], str], ...]] = (
    *(_collective, _collective, _uneven, _intercomm, _topology, _window, _file, _persistent),
    *map(_on_a_comm, ("laid_message", "laid_even", "laid_uneven", "laid_each", "folded")),
    *map(_on_a_comm, ("in_parts", "recorded", "appended")),
    *map(_of_all, ("around", "between", "accessed", "accessed")),
)


if __name__ == "__main__":
    sys.stdout.write(write_program(int(sys.argv[1]), int(sys.argv[2])))
