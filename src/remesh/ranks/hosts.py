"""Which ranks of a job are on which host? Ranks go host by host, in the order in which the hosts are named."""

from __future__ import annotations

import contextlib
import ipaddress
from dataclasses import dataclass

from remesh.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Host:
    """A host and how many ranks it gets."""

    name: str
    """Name or address for the launcher."""
    num_ranks: int


def parse_hosts(text: str, num_ranks: int) -> tuple[Host, ...]:
    """``"a,b"`` or ``"a:1,b:3"``: hosts with their ranks; those without a number share what is left evenly.

    >>> [host.num_ranks for host in parse_hosts("a:1,b,c", 4)]
    [1, 2, 1]
    """
    named = [part.strip().rpartition(":") if ":" in part else (part.strip(), "", "") for part in text.split(",")]
    try:
        slots = [(name, int(number) if number else None) for name, _, number in named]
    except ValueError as error:
        raise ConfigError(
            f"reading hosts {text!r}: {error}; expected NAME or NAME:RANKS, separated by commas"
        ) from error
    if not all(name for name, _ in slots):
        raise ConfigError(f"reading hosts {text!r}: a name is empty; expected NAME or NAME:RANKS, separated by commas")
    left = num_ranks - sum(number or 0 for _, number in slots)
    free = sum(number is None for _, number in slots)
    if left < free or (not free and left):
        room = f"{num_ranks - left}" + (f" and {free} hosts that share the rest" if free else "")
        raise ConfigError(
            f"reading hosts {text!r}: room for {room}, expected room for {num_ranks} ranks with one at least on each "
            "host; mend --hosts or the number of ranks"
        )
    shares = iter([left // free + (index < left % free) for index in range(free)] if free else [])
    return tuple(Host(name, next(shares) if number is None else number) for name, number in slots)


def is_loopback(name: str) -> bool:
    """Whether a host of this name is this one, whoever asks.

    >>> is_loopback("127.0.0.3"), is_loopback("localhost"), is_loopback("node3")
    (True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"
