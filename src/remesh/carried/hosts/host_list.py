"""Placement of a job's ranks on hosts: host by host, in the order in which the hosts are named."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from remesh.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Host:
    """A host and how many ranks it gets."""

    name: str
    """Name or address for the launcher."""
    num_ranks: int
    """At least 1."""


def parse_hosts(text: str, num_ranks: int) -> tuple[Host, ...]:
    """Parse ``"a,b"`` or ``"a:1,b:3"``: hosts with their ranks; those without a number share what is left evenly.

    >>> [host.num_ranks for host in parse_hosts("a:1,b,c", 4)]
    [1, 2, 1]
    """
    slots = _read_hosts(text)
    left = num_ranks - sum(number or 0 for _, number in slots)
    free = sum(number is None for _, number in slots)
    if left < free or (not free and left):
        room = f"{num_ranks - left}" + (f" and {free} hosts that share the rest" if free else "")
        raise ConfigError(
            f"reading hosts {text!r}: room for {room}, expected exactly {num_ranks} ranks, at least one on each "
            "host; correct --hosts or the number of ranks"
        )
    shares = iter([left // free + (index < left % free) for index in range(free)] if free else [])
    return tuple(Host(name, next(shares) if number is None else number) for name, number in slots)


def is_loopback(name: str) -> bool:
    """Whether a host of this name is this one, on every host.

    >>> is_loopback("127.0.0.3"), is_loopback("localhost"), is_loopback("node3")
    (True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


@dataclass(frozen=True, slots=True)
class RankSlot:
    """The host and local rank of one rank."""

    rank: int
    host: str
    """Name of its host."""
    host_index: int
    """Index of its host, from 0."""
    num_hosts: int
    local_rank: int
    """Index among the ranks of its host, from 0."""
    num_local: int
    """Number of ranks on its host."""


def assign_slots(hosts: Sequence[Host]) -> tuple[RankSlot, ...]:
    """The slot of every rank, in order.

    >>> [(slot.host, slot.local_rank) for slot in assign_slots([Host("a", 1), Host("b", 2)])]
    [('a', 0), ('b', 0), ('b', 1)]
    """
    places = [(index, local) for index, host in enumerate(hosts) for local in range(host.num_ranks)]
    return tuple(
        RankSlot(rank, hosts[index].name, index, len(hosts), local, hosts[index].num_ranks)
        for rank, (index, local) in enumerate(places)
    )


def describe_hosts(hosts: Sequence[Host]) -> str:
    """Describe hosts as a text that `parse_hosts` reads.

    >>> describe_hosts([Host("a", 1), Host("b", 2)])
    'a:1,b:2'
    """
    return ",".join(f"{host.name}:{host.num_ranks}" for host in hosts)


def count_ranks(text: str, per_host: int) -> int:
    """Count the ranks of hosts of which those without a number get ``per_host``.

    >>> count_ranks("a:3,b", 2)
    5
    """
    return sum(per_host if number is None else number for _, number in _read_hosts(text))


def _read_hosts(text: str) -> list[tuple[str, int | None]]:
    """Read the names with their numbers of ranks, None where the user gave none."""
    named = [part.strip().rpartition(":") if ":" in part else (part.strip(), "", "") for part in text.split(",")]
    try:
        slots = [(name, int(number) if number else None) for name, _, number in named]
    except ValueError as error:
        raise ConfigError(
            f"reading hosts {text!r}: a number of ranks is none; expected NAME or NAME:RANKS, separated by commas"
        ) from error
    if not all(name for name, _ in slots):
        raise ConfigError(f"reading hosts {text!r}: a name is empty; expected NAME or NAME:RANKS, separated by commas")
    if few := [name for name, number in slots if number is not None and number < 1]:
        raise ConfigError(f"reading hosts {text!r}: no rank for {', '.join(few)}, expected one at least on each host")
    return slots
