"""How ranks are started: a table, and what it makes of hosts."""

from __future__ import annotations

import pytest

from remesh.carried.hosts.host_list import Host
from remesh.carried.mpi.launch import ROWS, Reach, default_network, find_row, plan_start
from remesh.carried.mpi.mpis import KINDS, Installation
from remesh.carried.mpi.rsh import split_command
from remesh.foundation.errors import ConfigError

_TWO = (Host("10.0.0.2", 1), Host("10.0.0.3", 3))


def _installed(kind: str) -> Installation:
    return Installation(kind, "/opt/mpiexec", "/opt/python")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.mpi} {row.network}")
def test_every_row_starts_its_ranks(row) -> None:
    reach = Reach("/agent", "core", "/machines")
    if row.one_host is not None:
        command = plan_start(_installed(row.mpi), row.network, 4, (), Reach(), ("rank",)).command
        assert command[0] == "/opt/mpiexec" and command[-3:] == ("-n", "4", "rank")
        assert "/agent" not in command
    if row.hosts is not None:
        start = plan_start(_installed(row.mpi), row.network, 4, _TWO, reach, ("rank",))
        said = " ".join((*start.command, *start.files.values()))
        assert "/agent" in said and "10.0.0.2:1" in said and "10.0.0.3:3" in said


@pytest.mark.parametrize("kind", KINDS)
def test_every_mpi_has_a_usual_network_for_one_host_and_for_several(kind: str) -> None:
    for hosts in ((), _TWO):
        assert find_row(kind, default_network(kind, hosts), num_hosts=len(hosts))
    assert find_row(kind, "tcp", num_hosts=1)


def test_a_network_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="expected --network tcp"):
        find_row("openmpi", "shm", num_hosts=2)


def test_hosts_take_all_ranks_or_the_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="hosts 10.0.0.2:1, 10.0.0.3:3 take another number"):
        plan_start(_installed("mpich"), "ofi", 5, _TWO, Reach(), ("rank",))


def test_only_open_mpi_is_told_that_root_may() -> None:
    assert "OMPI_ALLOW_RUN_AS_ROOT" in plan_start(_installed("openmpi"), "shm", 1, (), Reach(), ("r",)).environment
    assert not plan_start(_installed("mpich"), "ofi", 1, (), Reach(), ("r",)).environment


def test_only_on_shared_memory_ranks_read_each_others_memory() -> None:
    assert plan_start(_installed("mpich"), "shm", 1, (), Reach(), ("r",)).environment == {"REMESH_WIRE_DIRECT": "1"}
    assert not plan_start(_installed("impi"), "tcp", 1, (), Reach(), ("r",)).environment


@pytest.mark.parametrize(
    ("words", "host"),
    [
        (["-x", "h", "cmd", "-n"], "h"),
        (["-o", "StrictHostKeyChecking=no", "h", "cmd", "-n"], "h"),
        (["h", "cmd -n"], "h"),
    ],
)
def test_options_of_ssh_are_passed_over(words: list[str], host: str) -> None:
    assert split_command(words) == (host, "cmd -n")
