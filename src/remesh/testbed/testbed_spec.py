"""Description of a testbed: its hosts, the rates of their links, and the names of its parts.

Definitions. A *bed* is a set of hosts on one machine. Each host has one full-duplex link of its own rate to the switch
of its rack; a rack may have an uplink of limited rate to the switch in the middle:

    host a ── link ──┐
    host b ── link ──┤ switch of rack r ── uplink ──┐
                                                    ├ core
    host c ── link ── switch of rack s ── uplink ───┘

Hosts that name no rack stand at the core switch. Every host is a network namespace, all switches together are one more.
The name of a namespace holds its owner (`Owner`: process id, and when that process started, since ids come again),
which bed of that process it is, and which host: from it a process that finds it later knows whether its owner still
lives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remesh.foundation.errors import ConfigError

MIN_RATE_BYTES_PER_S = 1_000.0
"""Below this a single packet takes seconds."""
MIN_WINDOW_BYTES = 8 << 10
"""A few packets."""
MAX_HOSTS = 1000
"""A Linux bridge has 1,024 ports."""
_HOST_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_UNITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "bps": 1.0, "kbps": 1e3, "mbps": 1e6}
"""As `tc` spells them: ``bit`` counts bits, ``bps`` counts bytes."""
_RATE = re.compile(r"([0-9]+(?:\.[0-9]*)?)([a-z]+)")
_NAMESPACE = re.compile(r"remesh-(\d+)-(\d+)-(\d+)-(\d+|switch)(?:-([a-z][a-z0-9-]*))?")


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host and its link."""

    name: str
    """Its host name: lower case letters, digits and dashes. Invariant: unique in a testbed."""
    rate_bytes_per_s: float | None
    """Rate of its link in each direction, headers included; None for as fast as this machine goes."""
    rack: str = ""
    """Its rack; empty for none."""

    def __post_init__(self) -> None:
        if not _HOST_NAME.fullmatch(self.name):
            raise ConfigError(
                f"describing a testbed: host name {self.name!r}, expected up to 31 lower case letters, digits and "
                "dashes, a letter first; rename the host"
            )
        _check_rate(f"host {self.name!r}", self.rate_bytes_per_s)


@dataclass(frozen=True)
class BedSpec:
    """A whole testbed: hosts in order of rank, and the uplinks of its racks.

    >>> BedSpec.parse("a=200mbit,b=100mbit").hosts[1].rate_bytes_per_s
    12500000.0
    """

    hosts: tuple[HostSpec, ...]
    uplinks: Mapping[str, float | None] = field(default_factory=dict)
    """Rate of each rack's uplink in bytes per second, each direction. Invariant: has exactly the racks of the hosts."""
    congestion_control: str = "reno"
    """How TCP finds its rate, by the kernel's name for it; only ``reno`` may be chosen on every machine."""
    window_bytes: int | None = 256 << 10
    """How much a connection may have under way, at most; None to leave it to TCP. The default is small enough that the
    queues hold what many senders of one receiver have under way: nothing is dropped, as in the lossless fabrics of
    clusters, and no retransmission timer blurs what is measured."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise ConfigError(
                f"describing a testbed: {len(self.hosts)} hosts, expected 1 to {MAX_HOSTS}; change their number"
            )
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"describing a testbed: host {name!r} appears twice; rename one")
        racks = {host.rack for host in self.hosts if host.rack}
        if racks != set(self.uplinks):
            raise ConfigError(
                f"describing a testbed: hosts stand in racks {sorted(racks)}, uplinks are given for "
                f"{sorted(self.uplinks)}, expected the same; add or drop an uplink"
            )
        for rack, rate in self.uplinks.items():
            if not _HOST_NAME.fullmatch(rack):
                raise ConfigError(f"describing a testbed: rack name {rack!r}, expected one like a host's; rename it")
            _check_rate(f"uplink of rack {rack!r}", rate)
        if self.window_bytes is not None and self.window_bytes < MIN_WINDOW_BYTES:
            raise ConfigError(
                f"describing a testbed: window of {self.window_bytes} bytes, expected at least {MIN_WINDOW_BYTES}; "
                "None leaves it to TCP"
            )
        if not re.fullmatch(r"[a-z0-9_]+", self.congestion_control):
            raise ConfigError(
                f"describing a testbed: congestion control {self.congestion_control!r}, expected a name such as reno"
            )

    @classmethod
    def uniform(cls, num_hosts: int, rate_bytes_per_s: float | None) -> BedSpec:
        """Hosts ``host0``, ``host1``, ... with equal links."""
        return cls(tuple(HostSpec(f"host{number}", rate_bytes_per_s) for number in range(num_hosts)))

    @classmethod
    def parse(cls, text: str) -> BedSpec:
        """``"4x200mbit"``: equal hosts; ``"a=200mbit,b=100mbit"``: named ones. `parse_rate` reads the rates."""
        if match := re.fullmatch(r"(\d{1,4})x([^,=]+)", text.strip()):
            return cls.uniform(int(match[1]), parse_rate(match[2]))
        hosts = []
        for part in text.split(","):
            name, equals, rate = part.strip().partition("=")
            if not equals:
                raise ConfigError(
                    f"reading testbed {text!r}: found {part!r}, expected NUMBERxRATE or NAME=RATE,...; as in 4x200mbit"
                )
            hosts.append(HostSpec(name, parse_rate(rate)))
        return cls(tuple(hosts))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts, in order."""
        return tuple(host.name for host in self.hosts)

    def index_of(self, host: str) -> int:
        """Position of a host; a `ConfigError` names the hosts there are."""
        if host not in self.names:
            raise ConfigError(f"finding host {host!r} of a testbed: it has {', '.join(self.names)}; name one of these")
        return self.names.index(host)

    def to_json(self) -> dict[str, Any]:
        """The description as JSON values; `from_json` makes an equal one of them."""
        hosts = [
            {"name": host.name, "rate_bytes_per_s": host.rate_bytes_per_s} | ({"rack": host.rack} if host.rack else {})
            for host in self.hosts
        ]
        return {
            "hosts": hosts,
            "uplinks": dict(self.uplinks),
            "congestion_control": self.congestion_control,
            "window_bytes": self.window_bytes,
        }

    @classmethod
    def from_json(cls, value: Any) -> BedSpec:
        """The testbed that these JSON values describe; a `ConfigError` for what is none."""
        found = _fields(value, {"hosts"}, {"uplinks", "congestion_control", "window_bytes"}, "a testbed")
        hosts, uplinks = found["hosts"], found.get("uplinks", {})
        if not isinstance(hosts, list) or not isinstance(uplinks, dict):
            raise ConfigError("reading a testbed: expected a list of hosts and an object of uplinks; correct the file")
        made = []
        for host in hosts:
            fields = _fields(host, {"name", "rate_bytes_per_s"}, {"rack"}, "a host of a testbed")
            rate = _number(fields["rate_bytes_per_s"], "rate_bytes_per_s")
            made.append(HostSpec(str(fields["name"]), rate, str(fields.get("rack", ""))))
        rates = {str(rack): _number(rate, f"uplink {rack}") for rack, rate in uplinks.items()}
        rules = {name: found[name] for name in ("congestion_control", "window_bytes") if name in found}
        if not isinstance(rules.get("congestion_control", ""), str) or not _is_size(rules.get("window_bytes")):
            raise ConfigError(
                f"reading a testbed: found {rules}, expected a name and a number of bytes; correct the file"
            )
        return cls(tuple(made), rates, **rules)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that made a testbed."""

    pid: int
    started_ticks: int
    """When it started, in clock ticks since the machine did: distinguishes it from a later process of the same id."""


@dataclass(frozen=True, slots=True)
class NamespaceName:
    """The fields in the name of a namespace of a testbed."""

    owner: Owner
    bed: int
    """Counts the testbeds of the owner."""
    index: int | None
    """Position of the host; None for the switches."""
    host: str = ""
    """Name of the host; empty for the switches."""

    def __str__(self) -> str:
        place = "switch" if self.index is None else f"{self.index}-{self.host}"
        return f"remesh-{self.owner.pid}-{self.owner.started_ticks}-{self.bed}-{place}"

    @classmethod
    def parse(cls, text: str) -> NamespaceName | None:
        """The fields in a name; None for a namespace that is not of a testbed.

        >>> NamespaceName.parse("remesh-4711-123-0-2-trainer").host
        'trainer'
        """
        match = _NAMESPACE.fullmatch(text)
        if match is None or (match[4] == "switch") != (match[5] is None):
            return None
        owner = Owner(int(match[1]), int(match[2]))
        return cls(owner, int(match[3]), None if match[4] == "switch" else int(match[4]), match[5] or "")


def parse_rate(text: str) -> float | None:
    """Bytes per second of a rate as `tc` spells it; None for ``"full"``, as fast as the machine goes.

    >>> parse_rate("200mbit"), parse_rate("64kbps")
    (25000000.0, 64000.0)
    """
    text = text.strip().lower()
    if text == "full":
        return None
    match = _RATE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"reading rate {text!r}: expected a number with one of {', '.join(_UNITS)}, or full; as in 200mbit"
        )
    return float(match[1]) * _UNITS[match[2]]


def describe_rate(rate_bytes_per_s: float | None) -> str:
    """A rate for people: ``"200 Mbit/s"``."""
    if rate_bytes_per_s is None:
        return "full speed"
    return f"{rate_bytes_per_s * 8 / 1e6:.4g} Mbit/s"


def _check_rate(what: str, rate_bytes_per_s: float | None) -> None:
    if rate_bytes_per_s is not None and not MIN_RATE_BYTES_PER_S <= rate_bytes_per_s < float("inf"):
        raise ConfigError(
            f"describing a testbed: {what} has rate {rate_bytes_per_s} bytes/s, expected at least "
            f"{MIN_RATE_BYTES_PER_S:.0f} and finite; None stands for as fast as the machine goes"
        )


def _fields(value: Any, needed: set[str], allowed: set[str], what: str) -> dict[str, Any]:
    found = set(value) if isinstance(value, dict) else set()
    if not isinstance(value, dict) or not needed <= found <= needed | allowed:
        raise ConfigError(
            f"reading {what}: found {sorted(map(str, found)) if found else type(value).__name__}, expected an object "
            f"with {sorted(needed)} and at most {sorted(allowed)} besides; correct the file"
        )
    return value


def _is_size(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _number(value: Any, what: str) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"reading a testbed: {what} is {value!r}, expected a number of bytes per second, or null")
