"""Exit codes of all commands, with their meaning: one table.

1 is torchrun's code for failed workers, 2 is click's for wrong usage; 70 and 75 are EX_SOFTWARE and EX_TEMPFAIL of
sysexits.h, and 80 and 81 are the first that it leaves free; 127 and 128 + n are a shell's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of Remesh's own commands."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DEFECT = 70
    TRY_AGAIN = 75
    LEFT = 80
    LEFT_WITHOUT_STATE = 81
    NOT_FOUND = 127


_SIGNALS = 128


def of_signal(number: int) -> int:
    """The code of a program that a signal has ended."""
    return _SIGNALS + number


@dataclass(frozen=True, slots=True)
class ExitRow:
    """A row of the table."""

    code: str
    verbs: str
    meaning: str


ROWS = (
    ExitRow("0", "all", "done; a job ended well; `ckpt diff` found no difference"),
    ExitRow("1", "all", "an error, printed in one message; a worker or a rank failed; `ckpt diff` found a difference"),
    ExitRow("1", "mpi doctor", "something is missing that MPI programs need"),
    ExitRow("2", "all", "wrong usage: a verb, an option, an argument, or what they name: a layout, a file, a job"),
    ExitRow("70", "run", "a defect of Remesh, with its traceback"),
    ExitRow("75", "run", "hosts, network, store or disk; the same command may work next time"),
    ExitRow("80", "run", "this node left on request (SIGTERM); the job lost nothing with it"),
    ExitRow("81", "run", "this node left on request; what its workers held was not handed over"),
    ExitRow("127", "testbed run", "the program cannot be run"),
    ExitRow("128 + n", "run, testbed run", "ended by signal n"),
    ExitRow("another", "mpi run, mpi restart, testbed run", "that of the program which failed first"),
)
"""What `docs/cli.md` shows."""
