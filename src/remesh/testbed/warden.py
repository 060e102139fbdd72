"""Who removes a bed whose owner was killed? A small process that waits for the owner's end, however it comes.

A bed lives in the kernel. The warden holds the reading end of a pipe whose writing end only the owner has: when the
kernel closes that, the owner is gone, or has removed the bed itself and dismisses its warden. It removes what it finds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from remesh.errors import ConfigError
from remesh.testbed import namespaces

_SOURCE = os.fspath(Path(__file__).resolve().parents[2])
"""The folder that holds the package."""
_DISMISSAL_S = 10.0


class Warden:
    """The running warden of a bed, seen from its owner."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        """Let it look after these namespaces and this folder, which need not be there yet."""
        command = [sys.executable, "-S", "-P", "-m", "remesh.testbed.warden", os.fspath(folder), *names]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": _SOURCE},
            start_new_session=True,  # what is meant for the owner's group is not meant for it
        )

    def dismiss(self) -> None:
        """Let it look once more, and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_DISMISSAL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main(folder: str, names: Sequence[str]) -> None:
    """Wait for the end of standard input, then remove the bed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    try:
        namespaces.remove(names)
    except ConfigError as error:
        sys.stderr.write(f"remesh: {error}\n")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
