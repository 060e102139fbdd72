"""Programs as `python PROGRAM ARGUMENTS` runs them, in processes that are forked of one that has torch already.

Shared is the import of torch, which most of them would begin with. Nothing else: each has a process of its own, with
its own imports and names.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from remesh.testbed.quiet_limit import QuietLimit
from remesh.testbed.rank_process import fork_server
from tests.procs.progress import Headway
from tests.procs.stacks import TELLING, end_with_stacks

_CHILD = Path(__file__).with_name("scripts") / "forked.py"
ALONE: Final = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "120"}
"""Variables of a program that nobody launches."""
QUIET_S: Final = 60.0
"""So long a program may get nowhere."""
_LOOK_S = 1.0


class ForkedProgram:
    """The process of a program; as `subprocess.Popen`."""

    def __init__(self, process: Any, output: Path, errors: Path) -> None:
        self._process = process
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel
        self.output, self.errors = output, errors

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another process waits for its end, and was quicker
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end_with_stacks(self) -> None:
        """End it, and all that it has started, if it runs; where they stood is at the end of its errors."""
        if self.poll() is None:
            end_with_stacks(self.pid, self.errors)
            self._process.join()


def start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path, errors: Path
) -> ForkedProgram:
    """Start a program, or ``-m`` and a module, in a folder; what it prints is put behind what is there.

    ``environment`` comes on top of the one that this process has now.
    """
    told = {
        "OUTPUT": str(output),
        "ERRORS": str(errors),
        "FOLDER": str(folder),
        "WORDS": tuple(words),
        "ENVIRONMENT": {**os.environ, **TELLING, **environment},
    }
    process = fork_server().Process(
        target=runpy.run_path, args=(str(_CHILD),), kwargs={"init_globals": told, "run_name": "__main__"}
    )
    process.start()
    return ForkedProgram(process, output, errors)


def module_of(words: Sequence[str]) -> str:
    """The module behind ``remesh`` with these words; behind an agent, one that has its workers forked likewise."""
    return "tests.procs.forked_agent" if words[0] == "run" else "remesh"


def end(programs: Sequence[ForkedProgram], quiet_s: float = QUIET_S) -> list[int | None]:
    """Exit codes of programs, once all have ended; None for one that was ended, since they got nowhere for so long."""
    headway = Headway([program.pid for program in programs])
    limit = QuietLimit(lambda: (headway(), _num_printed(programs)), quiet_s)
    codes: list[int | None] = [None] * len(programs)
    try:
        while None in (codes := [program.poll() for program in programs]) and not limit.is_over():
            running = [program.sentinel for program, code in zip(programs, codes, strict=True) if code is None]
            wait(running, _LOOK_S)
    except BaseException as error:  # most likely the test's own limit: say where they are
        for program in programs:
            program.end_with_stacks()
            error.add_note(_what(program.errors))
        raise
    finally:
        for program in programs:
            program.end_with_stacks()
    return codes


def _num_printed(programs: Sequence[ForkedProgram]) -> int:
    files = {path for program in programs for path in (program.output, program.errors)}
    return sum(path.stat().st_size for path in files if path.exists())


def run_program(program: Path, folder: Path, *arguments: str) -> str:
    """What a program prints that is run in a folder. AssertionError, with that, unless it ends well."""
    output, errors = folder / ".output", folder / ".errors"
    (code,) = end([start([str(program), *arguments], folder, ALONE, output, errors)])
    said = _what(output)
    assert code == 0, (
        f"{program.name} ended with {code} (None: got nowhere for {QUIET_S:.0f} s):\n{said}{_what(errors)}"
    )
    return said


def _what(path: Path) -> str:
    """What was printed there; nothing before a program has begun."""
    return path.read_text(errors="replace") if path.exists() else ""
