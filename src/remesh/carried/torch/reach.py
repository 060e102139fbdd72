"""Command line that starts a command on a host: directly, in a testbed, by Slurm's srun, or by ssh."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from remesh.carried.hosts.host_list import Host, is_loopback
from remesh.foundation.source_folder import SOURCE
from remesh.testbed import Testbed
from remesh.testbed.inside import command_inside

_ALLOCATION: Final = "SLURM_JOB_ID"
# One process on that host; it takes none of the allocation away from others, and is bound to no core.
_SRUN: Final = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--quit-on-interrupt")


def command_on(
    host: Host, command: Sequence[str], bed: Testbed | None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """The command that runs ``command`` on a host; ``environ`` shows whether this process has an allocation of Slurm.

    Ways to start a command pass on different parts of the environment, so the command itself sets what Remesh needs.
    """
    if bed is not None:
        return command_inside(bed.entry_of(host.name), command)
    if is_loopback(host.name) or host.name == socket.gethostname():
        return list(command)
    words = ("env", f"PYTHONPATH={SOURCE}", *command)
    if _ALLOCATION in environ:
        return [*_SRUN, f"--nodelist={host.name}", *words]
    return ["ssh", host.name, shlex.join(words)]
