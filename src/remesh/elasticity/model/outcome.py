"""Outcome of a job: categories of failure, exit codes, and the choice of the cause.

    category        exit code   who must act
    input           2           the author of the command or of the call: flags, script path, mesh, folders
    worker          1           the author of the script: its code raised, exited, or was killed
    platform        70          the authors of Remesh: the agent itself failed
    infrastructure  75          the operator: hosts, network, store, disk; the same command may work next time

A node that was asked to leave ends with 80, or with 81 where what it held was not handed over: 0 is for jobs that are
done. An agent that a signal ended exits with 128 + its number. Where the codes come from:
`remesh.foundation.exit_codes`.

The cause of a failed job is the earliest failure that is no *consequence*: ranks whose peer died fail too, with a
network error or because they got the signal to end. Times are compared within a node only, for clocks of hosts differ:
between nodes the order in which they reported their failures counts.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from remesh.foundation.exit_codes import ExitCode
from remesh.groups.blame import is_network_text

_SIGTERM = 15
_MAX_TEXT_CHARS = 4000
"""Characters of a text that are sent to others. Errors of programs have texts of any length."""
MOST_TRACED = 100_000
"""The same of a traceback."""


class Category(enum.Enum):
    """The category of an outcome, by who must act."""

    INPUT = "input"
    WORKER = "worker"
    PLATFORM = "platform"
    INFRASTRUCTURE = "infrastructure"

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self]

    @property
    def who(self) -> str:
        """The category, and who must act, in words."""
        return _WHO[self]


_EXIT_CODES = {
    Category.INPUT: ExitCode.USAGE,
    Category.WORKER: ExitCode.FAILED,
    Category.PLATFORM: ExitCode.DEFECT,
    Category.INFRASTRUCTURE: ExitCode.TRY_AGAIN,
}
_WHO = {
    Category.INPUT: "input error: correct the command",
    Category.WORKER: "worker failure: the script's author must act",
    Category.PLATFORM: "platform error: a defect of Remesh, report it",
    Category.INFRASTRUCTURE: "infrastructure error: look at hosts, network and store",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one agent's part of a job ended.

    >>> int(Outcome(Category.INPUT, "no such script").exit_code)
    2
    """

    category: Category | None
    """None when it ended well, or on request."""
    text: str
    detail: str = ""
    """A traceback, where there is one."""
    code: ExitCode = ExitCode.OK
    """The code of an end that is no failure: a node that left has codes of its own."""

    @property
    def is_ok(self) -> bool:
        return self.category is None

    @property
    def exit_code(self) -> int:
        return self.code if self.category is None else self.category.exit_code

    def describe(self, node: str) -> str:
        """The text that the agent prints at the end: the detail, then one line."""
        if self.category is None:
            return f"remesh: {node} {self.text}"
        last = f"remesh: job failed on {node} [{self.category.who}]: {self.text}"
        return "\n".join(filter(None, [self.detail.rstrip(), last]))


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """One worker's end, as its agent saw it."""

    rank: int
    """Global rank."""
    local_rank: int
    node: str
    pid: int
    exit_code: int
    """Negative: the number of the signal that killed it."""
    time_s: float
    """Seconds since the epoch on its node's clock; from the error file where there is one."""
    message: str
    traceback: str = ""
    """Empty when the worker left no error file."""
    order: int = 0
    """The order in which nodes reported their failures: earlier ones have smaller numbers."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WorkerFailure:
        return cls(**value)

    @property
    def is_consequence(self) -> bool:
        """Whether it failed as ranks fail whose peer is gone, or ended by the signal that its agent sent."""
        return self.exit_code == -_SIGTERM or is_network_text(self.traceback)


def shortened(text: str, most: int = _MAX_TEXT_CHARS) -> str:
    """A text as it is sent to others: a store refuses very long values, and a sender that repeats one loses it.

    >>> shortened("abcdefgh", 4)
    'ab ... gh'
    """
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"


def decide_cause(failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, str]:
    """The failure to report, and why this one. Raises ValueError when there is none."""
    causes = [failure for failure in failures if not failure.is_consequence]
    earliest = min(causes or failures, key=lambda failure: (failure.order, failure.time_s, failure.rank))
    others = len(failures) - 1
    if not others:
        return earliest, "the only failure"
    if causes and len(causes) < len(failures):
        return earliest, f"earliest of {len(causes)} failures that follow from no other ({len(failures)} in all)"
    return earliest, f"earliest of {len(failures)} failures"


def describe_failure(failure: WorkerFailure) -> str:
    """One sentence: which rank, where, how."""
    how = f"killed by signal {-failure.exit_code}" if failure.exit_code < 0 else f"exit code {failure.exit_code}"
    text = f"rank {failure.rank} (worker {failure.local_rank} of {failure.node}, pid {failure.pid}) failed, {how}"
    return f"{text}: {failure.message}" if failure.message else text


def describe_signal(ended: SystemExit) -> str:
    """What ended an agent that exits with 128 + the number of a signal."""
    return f"ended by {signal.Signals(int(ended.code or 0) - 128).name}"
