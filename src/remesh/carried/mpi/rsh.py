"""``python -m remesh.carried.mpi.rsh DOORS [options] ADDRESS COMMAND...`` stands in for ssh on a testbed's hosts.

A launcher starts its helper on each host through it. The host is found by its address, entered, and the command line
runs there in a shell. Options of ssh mean nothing here and are passed over.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from remesh.foundation.errors import ConfigError
from remesh.testbed.inside import HostEntry

_WITH_VALUE = frozenset("bcDEeFIiJLlmOopQRSWw")
"""Letters of ssh's options that take a value."""


def write_entries(path: Path, entries: Mapping[str, HostEntry]) -> None:
    """Note how the host of each address is entered."""
    path.write_text(json.dumps({address: asdict(entry) for address, entry in entries.items()}))


def split_command(words: Sequence[str]) -> tuple[str, str]:
    """Host and command line of the arguments of an ssh.

    >>> split_command(["-x", "-p", "22", "10.77.0.3", "orted", "--tree", "1"])
    ('10.77.0.3', 'orted --tree 1')
    """
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if len(option) == 2 and option[1] in _WITH_VALUE and rest:
            rest.pop(0)
    if not rest:
        raise ConfigError(f"reading an ssh command {list(words)}: it names no host")
    host, *command = rest
    return host, " ".join(command)


def main(arguments: Sequence[str]) -> None:
    """Enter the host and become the shell that runs the command."""
    entries, *words = arguments
    address, command = split_command(words)
    known = json.loads(Path(entries).read_text())
    if address not in known:
        raise ConfigError(f"reaching {address}: the testbed has {', '.join(known)}")
    HostEntry(**known[address]).enter()
    os.execv("/bin/sh", ["/bin/sh", "-c", command])


if __name__ == "__main__":
    main(sys.argv[1:])
