"""Main loop of an upper half's init: it reaps, and ends with the program or the lower half.

A program of a tenth of a megabyte does it in the place of this process (``_reaper.c``). Where Remesh was built without
a C compiler, this process goes on itself: the same in Python, with all that it has loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from pathlib import Path
from typing import Any, Final, NoReturn

REAPER: Final = Path(__file__).parent / "built" / "remesh-init"


def reap_until_the_end(orders: int, news: int, program: int) -> NoReturn:
    """Reap all that end; after the program, report its status and end: the kernel ends all that is left here.

    ``program`` is its process id.

    No process is reaped before a byte comes by ``orders``: until then a program that has ended is found by its id.
    """
    if REAPER.exists():
        os.set_inheritable(orders, True)
        os.set_inheritable(news, True)
        os.execv(REAPER, [REAPER.name, str(orders), str(news), str(program)])
    wakeup_out, wakeup_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup_in, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _ignore)
    if os.read(orders, 1):
        _reap(orders, news, wakeup_out, program)
    os._exit(0)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: the signal wakes `select` by way of the wakeup descriptor."""


def _reap(orders: int, news: int, wakeup: int, program: int) -> None:
    while True:
        while (ended := _reap_one())[0]:
            pid, status = ended
            if pid == program:
                tell(news, {"event": "ended", "status": os.waitstatus_to_exitcode(status)})
                return
        readable, _, _ = select.select([orders, wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, 4096)
        if orders in readable and not os.read(orders, 1):
            return


def _reap_one() -> tuple[int, int]:
    """The id and status of a child that had ended; 0, 0 if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def tell(news: int, what: dict[str, Any]) -> None:
    """Send a line to the lower half, if it still listens."""
    with contextlib.suppress(OSError):
        os.write(news, json.dumps(what).encode() + b"\n")
