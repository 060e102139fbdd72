"""Launch commands of each MPI, on each network, on one host or several: a table, and one function.

All that is known about one MPI stands in its rows here: the rest of the room is the same for all. To add a network is
to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from remesh.carried.hosts.host_list import Host
from remesh.carried.mpi.mpis import Installation
from remesh.foundation.errors import ConfigError
from remesh.foundation.settings import WIRE_DIRECT, WIRE_PROBES

SHM: Final = "shm"
TCP: Final = "tcp"

_ROOT_ALLOWED: Final = {
    name: "1"
    for prefix in ("OMPI", "PRTE")
    for name in (f"{prefix}_ALLOW_RUN_AS_ROOT", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM")
}
"""Open MPI refuses to run as root without these; whether root may is decided by who starts us."""
# Ranks are not bound to cores: with more ranks than cores, bound ones would share one core.
_OPENMPI: Final = ("--bind-to", "none", "--oversubscribe")
_OB1: Final = ("--mca", "pml", "ob1", "--mca", "btl")
_IMPI: Final = ("-genv", "I_MPI_PIN", "0", "-genv", "I_MPI_FABRICS")
# Its collectives would use shared memory between ranks of one host all the same.
_IMPI_TCP: Final = (*_IMPI, "ofi", "-genv", "FI_PROVIDER", "tcp", "-genv", "I_MPI_COLL_INTRANODE", "pt2pt")
_NOLOCAL: Final = ("-genv", "MPIR_CVAR_NOLOCAL", "1")
# MPICH has shared memory of its own for ranks of one host. UCX, which it starts beside that and does not use there,
# would make buffers of 4 MB for two kinds of shared memory: so it makes one kind, of 0.1 MB. Its modules, for devices
# of other networks, take 1 MB with the libraries that they need: none is loaded.
_FEW_BUFFERS_OF_UCX: Final = (*("-genv", "UCX_POSIX_RX_BUFS_GROW", "8"), *("-genv", "UCX_POSIX_FIFO_SIZE", "16"))
_ONE_WAY_OF_UCX: Final = ("-genv", "UCX_TLS", "posix,self", "-genv", "UCX_MODULES", "^*", *_FEW_BUFFERS_OF_UCX)


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """Options of a launcher for one network."""

    mpi: str
    network: str
    one_host: tuple[str, ...] | None
    """Options for a single host; None if the network does not serve one."""
    hosts: tuple[str, ...] | None
    """Options for several hosts."""


ROWS: Final = (
    LaunchRow("openmpi", "shm", (*_OPENMPI, *_OB1, "self,sm"), None),
    # Without a network interface of its own, as in a container, TCP finds the loopback only when it is named.
    LaunchRow(
        "openmpi",
        "tcp",
        (*_OPENMPI, *_OB1, "self,tcp", "--mca", "btl_tcp_if_include", "lo"),
        (*_OPENMPI, *_OB1, "self,tcp"),
    ),
    LaunchRow("mpich", "shm", _ONE_WAY_OF_UCX, None),
    LaunchRow(
        "mpich",
        "ofi",
        (*_NOLOCAL, "-genv", "MPIR_CVAR_CH4_NETMOD", "ofi", "-genv", "FI_PROVIDER", "tcp"),
        (*_NOLOCAL, "-genv", "MPIR_CVAR_CH4_NETMOD", "ofi", "-genv", "FI_PROVIDER", "tcp"),
    ),
    # UCX looks through network namespaces and would use shared memory between hosts that share a machine. With it a
    # receive from any source that is posted before its message arrives is sometimes never completed (MPICH 5.0.2).
    LaunchRow("mpich", "ucx", None, (*_NOLOCAL, "-genv", "UCX_TLS", "tcp,self", "-genv", WIRE_PROBES.name, "1")),
    LaunchRow("impi", "shm", (*_IMPI, "shm"), None),
    LaunchRow("impi", "tcp", _IMPI_TCP, _IMPI_TCP),
)
_DEFAULTS: Final = {"openmpi": "tcp", "mpich": "ofi", "impi": "tcp"}
"""The networks between hosts; on one host the default is shared memory."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The way in which a launcher reaches the hosts."""

    agent: str | None = None
    """Program in place of ssh; None for ssh itself."""
    interface: str | None = None
    """Network interface on the launcher's host; None leaves it to the launcher."""
    machine_file: str = ""
    """Path for a file with hosts and ranks, for launchers that need one."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """The command that starts the ranks."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that are set besides what the launcher inherits."""
    files: Mapping[str, str]
    """Path to text, for files that are written before the start."""


def default_network(mpi: str, hosts: Sequence[Host]) -> str:
    """The network that is used when the user names none."""
    return SHM if len(hosts) <= 1 else _DEFAULTS[mpi]


def find_row(mpi: str, network: str, *, num_hosts: int) -> LaunchRow:
    """The row of an MPI and a network; `ConfigError` names those there are. ``tcp`` is any network over TCP."""
    for row in ROWS:
        fits = row.mpi == mpi and (row.network == network or (network == TCP and row.network == _DEFAULTS[mpi]))
        if fits and (row.one_host if num_hosts <= 1 else row.hosts) is not None:
            return row
    known = [
        row.network for row in ROWS if row.mpi == mpi and (row.one_host if num_hosts <= 1 else row.hosts) is not None
    ]
    raise ConfigError(
        f"starting {mpi} on {'one host' if num_hosts <= 1 else f'{num_hosts} hosts'} over {network!r}: not in the "
        f"table of launches, expected --network {' or '.join(known)}"
    )


def plan_start(
    installation: Installation, network: str, num_ranks: int, hosts: Sequence[Host], reach: Reach, rank: Sequence[str]
) -> LaunchCommand:
    """The command that starts ``num_ranks`` processes of the command ``rank``; ``hosts`` is empty for this host."""
    row = find_row(installation.kind, network, num_hosts=len(hosts))
    if hosts and sum(host.num_ranks for host in hosts) != num_ranks:
        places = ", ".join(f"{host.name}:{host.num_ranks}" for host in hosts)
        raise ConfigError(f"placing {num_ranks} ranks: hosts {places} take another number; correct --hosts or -n")
    options = row.one_host if len(hosts) <= 1 else row.hosts
    assert options is not None
    place, files = _PLACES[installation.kind](hosts, reach) if hosts else ((), {})
    command = (installation.launcher, *options, *place, "-n", str(num_ranks), *rank)
    environment = _ROOT_ALLOWED if installation.kind == "openmpi" else {}
    direct = {WIRE_DIRECT.name: "1"} if network == SHM else {}
    return LaunchCommand(command, {**environment, **direct}, files)


def _place_openmpi(hosts: Sequence[Host], reach: Reach) -> tuple[tuple[str, ...], dict[str, str]]:
    agent = ("--prtemca", "plm_ssh_agent", reach.agent) if reach.agent else ()
    places = ",".join(f"{host.name}:{host.num_ranks}" for host in hosts)
    return (*agent, "--host", places), {}


def _place_mpich(hosts: Sequence[Host], reach: Reach) -> tuple[tuple[str, ...], dict[str, str]]:
    agent = ("-launcher", "ssh", "-launcher-exec", reach.agent) if reach.agent else ()
    interface = ("-iface", reach.interface) if reach.interface else ()
    places = ",".join(f"{host.name}:{host.num_ranks}" for host in hosts)
    return (*agent, *interface, "-hosts", places), {}


def _place_impi(hosts: Sequence[Host], reach: Reach) -> tuple[tuple[str, ...], dict[str, str]]:
    agent = ("-bootstrap", "ssh", "-bootstrap-exec", reach.agent) if reach.agent else ()
    interface = ("-iface", reach.interface) if reach.interface else ()
    lines = "".join(f"{host.name}:{host.num_ranks}\n" for host in hosts)
    return (*agent, *interface, "-machinefile", reach.machine_file), {reach.machine_file: lines}


_PLACES: Final = {"openmpi": _place_openmpi, "mpich": _place_mpich, "impi": _place_impi}
