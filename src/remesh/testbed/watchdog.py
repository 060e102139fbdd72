"""Handle on the process that removes a testbed if its owner is killed: started and dismissed by the owner.

The process is `remesh.testbed.watchdog_process`, which nothing here imports: it runs as a program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from remesh.foundation.source_folder import SOURCE

_END_GRACE_S = 10.0


class Watchdog:
    """The running watchdog of a testbed, seen from its owner."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        """Let it look after these namespaces and this folder, which need not be there yet."""
        command = [sys.executable, "-S", "-P", "-m", "remesh.testbed.watchdog_process", os.fspath(folder), *names]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": SOURCE},
            start_new_session=True,  # what is meant for the owner's group is not meant for it
        )

    def dismiss(self) -> None:
        """Let it look once more, and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
