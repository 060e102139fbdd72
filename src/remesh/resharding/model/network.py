"""Network description: hosts with their NICs, racks with their uplinks.

Model. Every host has one or more full-duplex NICs and a faster link between its own ranks. The switch inside a rack
never blocks; between racks all traffic of a rack shares its *uplink*, which may be slower than its hosts together
(*oversubscribed*). A host without a rack, or in a rack without a listed uplink, meets no other limit than its NICs.

JSON form, read from a file by the caller or written by `remesh net probe`:

    {"format": "remesh.network", "version": 1, "latency_s": 0.0001,
     "hosts": {"a": {"rate_bytes_per_s": 1.25e9, "num_nics": 2, "local_rate_bytes_per_s": 2e10, "rack": "r0"}, ...},
     "racks": {"r0": {"uplink_bytes_per_s": 5e9}}}

Of a host only the rate is required.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from remesh.foundation.errors import PlanError

FORMAT = "remesh.network"
VERSION = 1
_HOST_FIELDS = frozenset({"rate_bytes_per_s", "num_nics", "local_rate_bytes_per_s", "rack"})
_MAX_LISTED = 4


@dataclass(frozen=True, slots=True)
class HostLink:
    """The links of one host."""

    rate_bytes_per_s: float
    """What one NIC carries in each direction. Invariant: finite, > 0."""
    num_nics: int = 1
    """NICs of that rate; messages are spread over them. Invariant: >= 1."""
    local_rate_bytes_per_s: float = math.inf
    """What a rank can copy to another rank of the host; infinite when it does not count. Invariant: > 0."""
    rack: str | None = None
    """Name of the rack it stands in, if that matters."""

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate_bytes_per_s), ("local rate", self.local_rate_bytes_per_s)):
            if not _is_rate(value) or (name == "rate" and value == math.inf):
                raise PlanError(
                    f"describing a host of the network: its {name} is {value!r}, expected bytes per second > 0; "
                    "measure it, or leave the host out"
                )
        if not isinstance(self.num_nics, int) or isinstance(self.num_nics, bool) or self.num_nics < 1:
            raise PlanError(
                f"describing a host of the network: it has {self.num_nics!r} NICs, expected a whole number >= 1; "
                "leave a host without a NIC out"
            )
        if self.rack is not None and not isinstance(self.rack, str):
            raise PlanError(f"describing a host of the network: its rack is {self.rack!r}, expected a name or null")

    @property
    def total_rate_bytes_per_s(self) -> float:
        """The rate of all NICs of the host together, in each direction."""
        return self.rate_bytes_per_s * self.num_nics


@dataclass(frozen=True)
class Network:
    """All hosts that a plan may use, and how fast they reach each other.

    >>> slow, fast = HostLink(1e8), HostLink(1e9, num_nics=2)
    >>> network = Network({"a": slow, "b": fast}, latency_s=1e-4)
    >>> Network.from_json(network.to_json()) == network
    True
    """

    hosts: Mapping[str, HostLink]
    """Link of every host, by name, ascending."""
    latency_s: float = 0.0
    """Time that a message needs besides its bytes. Invariant: finite, >= 0."""
    racks: Mapping[str, float] = field(default_factory=dict)
    """Uplink of every rack that has a limit, ascending: bytes per second, each way. Invariant: > 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", dict(sorted(self.hosts.items())))
        object.__setattr__(self, "racks", dict(sorted(self.racks.items())))
        if not _is_number(self.latency_s) or not 0 <= self.latency_s < math.inf:
            raise PlanError(
                f"describing a network: its latency is {self.latency_s!r}, expected seconds >= 0; correct it"
            )
        inhabited = {link.rack for link in self.hosts.values()}
        for rack, rate in self.racks.items():
            if not _is_rate(rate) or rate == math.inf:
                raise PlanError(
                    f"describing a network: the uplink of rack {rack!r} has rate {rate!r}, expected bytes per second > "
                    "0; leave the rack out if it has no limit"
                )
            if rack not in inhabited:
                raise PlanError(
                    f"describing a network: rack {rack!r} has an uplink but none of {len(self.hosts)} hosts stands in "
                    "it, expected one or more; correct the rack's name, or the hosts'"
                )

    @classmethod
    def uniform(cls, hosts: Iterable[str]) -> Network:
        """Hosts whose only NIC carries one byte per unit of time: times are then bytes."""
        return cls(dict.fromkeys(sorted(set(hosts)), HostLink(1.0)))

    def rack_of(self, host: str) -> str | None:
        """The rack of a host, if its uplink is a limit."""
        rack = self.hosts[host].rack
        return rack if rack in self.racks else None

    def check_hosts(self, hosts: Iterable[str], doing: str) -> None:
        """Raise `PlanError` naming the hosts that the network does not have."""
        unknown = sorted(set(hosts) - self.hosts.keys())
        if unknown:
            listed = ", ".join(unknown[:_MAX_LISTED]) + (", ..." if len(unknown) > _MAX_LISTED else "")
            known = ", ".join(list(self.hosts)[:_MAX_LISTED]) + (", ..." if len(self.hosts) > _MAX_LISTED else "")
            raise PlanError(
                f"{doing}: hosts that are not in the network: {listed}; expected each of the {len(unknown)} among its "
                f"{len(self.hosts)}: {known}; add their links, or plan without a network"
            )

    def host_rates(self) -> dict[str, Fraction]:
        """The exact rate at which every host can send or receive."""
        return {host: Fraction(link.rate_bytes_per_s) * link.num_nics for host, link in self.hosts.items()}

    def rack_rates(self) -> dict[str, Fraction]:
        """The exact rate at which every rack with a limit can send or receive."""
        return {rack: Fraction(rate) for rack, rate in self.racks.items()}

    def to_json(self) -> dict[str, Any]:
        """The network as JSON values; `from_json` makes an equal one of them."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "latency_s": self.latency_s,
            "hosts": {host: _link_to_json(link) for host, link in self.hosts.items()},
            "racks": {rack: {"uplink_bytes_per_s": rate} for rack, rate in self.racks.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Network:
        """The network that these JSON values describe; raises `PlanError` for what is no network."""
        if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") != VERSION:
            found = (value.get("format"), value.get("version")) if isinstance(value, dict) else type(value).__name__
            raise PlanError(
                f"reading a network: found {found!r}, expected format {FORMAT!r} of version {VERSION}; write the "
                "file as the documentation of remesh.resharding.model.network shows"
            )
        hosts = _table(value, "hosts")
        racks = _table(value, "racks") if "racks" in value else {}
        uplinks = {}
        for rack, fields in racks.items():
            if not isinstance(fields, dict) or fields.keys() != {"uplink_bytes_per_s"}:
                raise PlanError(
                    f"reading a network: rack {rack!r} is {fields!r}, expected {{'uplink_bytes_per_s': ...}}"
                )
            uplinks[rack] = fields["uplink_bytes_per_s"]
        links = {host: _link_from_json(host, fields) for host, fields in hosts.items()}
        return cls(links, value.get("latency_s", 0.0), uplinks)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _is_rate(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]


def _link_to_json(link: HostLink) -> dict[str, Any]:
    fields: dict[str, Any] = {"rate_bytes_per_s": link.rate_bytes_per_s}
    if link.num_nics != 1:
        fields["num_nics"] = link.num_nics
    # JSON has no infinity: a field that is left out means it.
    if link.local_rate_bytes_per_s != math.inf:
        fields["local_rate_bytes_per_s"] = link.local_rate_bytes_per_s
    if link.rack is not None:
        fields["rack"] = link.rack
    return fields


def _link_from_json(host: str, fields: Any) -> HostLink:
    if not isinstance(fields, dict) or "rate_bytes_per_s" not in fields or not fields.keys() <= _HOST_FIELDS:
        raise PlanError(
            f"reading a network: host {host!r} is {fields!r}, expected rate_bytes_per_s and at most "
            f"{sorted(_HOST_FIELDS)}; correct the file"
        )
    try:
        return HostLink(**fields)
    except PlanError as raised:
        raise PlanError(f"reading a network: host {host!r}: {raised}") from raised


def _table(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = value.get(name)
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise PlanError(f"reading a network: {name!r} is {type(table).__name__}, expected a JSON object; correct it")
    return table
