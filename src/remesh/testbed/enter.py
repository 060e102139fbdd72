"""``python -m remesh.testbed.enter NAMESPACE HOST HOSTS_FILE PROGRAM ...`` enters a host and becomes the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from remesh.foundation.exit_codes import ExitCode
from remesh.testbed.inside import HostEntry


def main(arguments: Sequence[str]) -> None:
    """Enter the host and become the program."""
    namespace, host, hosts_file, *command = arguments
    HostEntry(namespace, host, hosts_file).enter()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"running {command[0]!r} on host {host}: {error.strerror}\n")
        sys.exit(ExitCode.NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
