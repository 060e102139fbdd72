"""Environment variables of Remesh: each with its default, its meaning and who reads it.

No other module names one. The table in docs/cli.md is made from this one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from remesh.foundation.errors import ConfigError

_MOST: Final = 1000


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """One variable."""

    name: str
    default: str
    """What holds where it is not set."""
    reader: str
    """The command or process that reads it."""
    meaning: str
    is_internal: bool = False
    """Whether Remesh sets it for its own processes, and users do not."""

    def read(self, environ: Mapping[str, str] = os.environ) -> str:
        """The value, or the default."""
        return environ.get(self.name, self.default)

    def is_on(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether it is set to 1."""
        return self.read(environ) == "1"


JOBS: Final = EnvironmentVariable(
    "REMESH_JOBS", "remesh-jobs", "remesh mpi, torch", "folder in which jobs are made and looked up"
)
STORE_TIMEOUT_S: Final = EnvironmentVariable(
    "REMESH_STORE_TIMEOUT_S", "300", "saves and loads", "seconds that a store of objects may take over one call"
)
TIMEOUT_FACTOR: Final = EnvironmentVariable(
    "REMESH_TIMEOUT_FACTOR", "1", "jobs", "multiplies how long connections, handshakes and stores are waited for"
)
TOKEN: Final = EnvironmentVariable(
    "REMESH_TOKEN", "", "remesh run, torchrun", "the job's secret, if no --token-file names it"
)
MPIS: Final = {
    name: EnvironmentVariable(
        f"REMESH_MPI_{name.upper()}", f".mpi/{name}", "remesh mpi", f"environment with {label} and mpi4py"
    )
    for name, label in (("openmpi", "Open MPI"), ("mpich", "MPICH"), ("impi", "Intel MPI"))
}
SHARED_ARRAYS: Final = EnvironmentVariable(
    "REMESH_SHARED_ARRAYS", "0", "MPI programs", "1: large blocks of memory are read by MPI where they stand"
)
SPIN: Final = EnvironmentVariable(
    "REMESH_SPIN", "0", "MPI programs", "1: both halves always spin; wants two cores a rank"
)
REDUCTIONS: Final = EnvironmentVariable(
    "REMESH_REDUCTIONS", "", "MPI programs", "`ordered`: reduce in the order of ranks"
)
PURE: Final = EnvironmentVariable("REMESH_PURE", "", "pip", "1: build a wheel without what is compiled")

LINK: Final = EnvironmentVariable("REMESH_LINK", "", "workers", "socket of the agent", is_internal=True)
AGENT: Final = EnvironmentVariable("REMESH_AGENT", "", "workers", "number of the node's agent", is_internal=True)
NODE: Final = EnvironmentVariable("REMESH_NODE", "", "workers", "name of the node", is_internal=True)
SLOT: Final = EnvironmentVariable("REMESH_SLOT", "0", "workers", "number of the worker on its node", is_internal=True)
EVENTS: Final = EnvironmentVariable("REMESH_EVENTS", "", "workers", "folder of the event logs", is_internal=True)
CHANNEL: Final = EnvironmentVariable(
    "REMESH_CHANNEL", "", "MPI programs", "file of the channel to the lower half", is_internal=True
)
PROGRAM: Final = EnvironmentVariable(
    "REMESH_PROGRAM", "", "torch programs", "process id of the rank's program, inside its namespace", is_internal=True
)
WIRE_PROBES: Final = EnvironmentVariable(
    "REMESH_WIRE_PROBES",
    "",
    "lower halves",
    "set for a network on which a receive from any source, once posted, may never complete: look for messages instead",
    is_internal=True,
)
WIRE_DIRECT: Final = EnvironmentVariable(
    "REMESH_WIRE_DIRECT",
    "",
    "lower halves",
    "set where the network is the shared memory of one host: long payloads are read where they are, past MPI",
    is_internal=True,
)

SETTINGS: Final = (
    *(JOBS, STORE_TIMEOUT_S, TIMEOUT_FACTOR, TOKEN, *MPIS.values(), SHARED_ARRAYS, SPIN, REDUCTIONS, PURE),
    *(LINK, AGENT, NODE, SLOT, EVENTS, CHANNEL, WIRE_PROBES, WIRE_DIRECT),
)
"""All of them."""


def timeout_s(seconds: float) -> float:
    """How long to wait where this many seconds do on most clusters; a slow one sets `TIMEOUT_FACTOR`."""
    text = TIMEOUT_FACTOR.read()
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= _MOST:
        raise ConfigError(
            f"reading {TIMEOUT_FACTOR.name}: found {text!r}, expected a number above 0 and at most {_MOST}; correct "
            "it, or unset it"
        )
    return seconds * factor
