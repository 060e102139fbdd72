"""Cleanup process of a testbed: it waits for the owner's end, however it comes, and removes the testbed.

A testbed lives in the kernel. The cleanup process (watchdog) holds the reading end of a pipe whose writing end only the
owner has: when the kernel closes that, the owner is gone, or has removed the testbed itself. It removes what it finds.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence

from remesh.foundation.errors import ConfigError
from remesh.testbed import network_namespaces


def main(folder: str, names: Sequence[str]) -> None:
    """Wait for the end of standard input, then remove the testbed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    try:
        network_namespaces.remove(names)
    except ConfigError as error:
        sys.stderr.write(f"remesh: {error}\n")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
