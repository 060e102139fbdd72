"""A program does not end before a test has stopped it: its last step waits until a gate is open.

Pauses pass on a busy machine as on an idle one, but who is to stop the program comes late. The gate is a file that the
environment names; without a name it is open. One rank waits at it, so that the others wait in MPI as in any step.
"""

import os
import time

_GATE = os.environ.get("TEST_GATE")


def wait_at_gate() -> None:
    """Return once the gate is open."""
    while _GATE and not os.path.exists(_GATE):
        time.sleep(0.01)
