"""Commands of `ip` and `tc` that make a testbed, change its links, and take it apart.

A command is a list of arguments; nothing here runs one. Links are pairs of virtual Ethernet ends. The end in the host
is called ``eth0``, the end at the switch ``port<index>``. Each end is shaped on its way out by a token bucket, so that
a link has its rate in each direction:

    host a │ eth0 ═> tbf ═══════════> port0 │ switch      what a sends
           │ eth0 <═══════════ tbf <═ port0 │             what a receives

The switches are Linux bridges in a namespace of their own, where the machine's firewall rules do not reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remesh.testbed.testbed_spec import BedSpec, NamespaceName, Owner

NIC = "eth0"
"""Interface of every host, for ``GLOO_SOCKET_IFNAME`` and its like."""
MTU_BYTES = 1500
SEGMENT_BYTES = 32 << 10
"""The most that TCP hands to an interface at once. As with the offloads of a real one, it stays whole up to the
receiver: one wake-up there instead of twenty, so that a machine can drive more hosts. It has to fit into a burst with
the headers of all its packets, or the token bucket takes it apart."""
QUEUE_MS = 100
"""How long a packet may wait for its turn before it is dropped."""
_BURST_BYTES = 2 * SEGMENT_BYTES
"""Bytes that may leave at once after a pause."""
_BURST_S = 0.001
"""On fast links the burst covers this time, or the bucket empties between two looks of the kernel."""
_FASTEST_BYTES_PER_S = 4e9
"""Rates above this are left unshaped: `tc` counts in 32 bits."""
_CORE = "core"

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BedNames:
    """Names and addresses of the parts of one testbed."""

    spec: BedSpec
    owner: Owner
    bed: int
    """Counts the testbeds of the owner."""

    @property
    def switch(self) -> str:
        """The namespace with all switches."""
        return str(NamespaceName(self.owner, self.bed, None))

    def namespace_of(self, host: str) -> str:
        """The namespace of a host."""
        return str(NamespaceName(self.owner, self.bed, self.spec.index_of(host), host))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces, the switches last."""
        return (*(self.namespace_of(host) for host in self.spec.names), self.switch)

    @property
    def switch_address(self) -> str:
        """Address at which hosts reach the switch namespace itself."""
        return "10.77.0.1"

    def address_of(self, host: str) -> str:
        """IPv4 address of a host, in a network of the testbed's own."""
        high, low = divmod(self.spec.index_of(host) + 2, 250)
        return f"10.77.{high}.{low + 1}"


def port_of(index: int) -> str:
    """Name of the switch's end of a host's link."""
    return f"port{index}"


def commands_to_make(names: BedNames) -> list[Command]:
    """Everything from nothing: namespaces, switches, links, addresses, rates."""
    spec = names.spec
    commands: list[Command] = [("ip", "netns", "add", namespace) for namespace in names.namespaces]
    commands += _in_switch(names, _make_switches(spec))
    for index, host in enumerate(spec.hosts):
        inside = names.namespace_of(host.name)
        bridge = _bridge_of(spec, host.rack)
        ends = (port_of(index), "netns", names.switch, "type", "veth", "peer", "name", NIC, "netns", inside)
        commands += [
            ("ip", "link", "add", *ends),
            *(("ip", "-n", inside, *rest) for rest in _make_host(f"{names.address_of(host.name)}/16")),
            *_in_switch(names, _plug(port_of(index), bridge)),
        ]
        commands += commands_to_shape(names, host.name, host.rate_bytes_per_s)
    commands += _shape_uplinks(names)
    return commands + [_tune(namespace, spec) for namespace in names.namespaces]


def _tune(namespace: str, spec: BedSpec) -> Command:
    """Set the rules of TCP in a namespace; these settings belong to the namespace that the writing process is in."""
    settings = {"tcp_congestion_control": spec.congestion_control}
    if spec.window_bytes is not None:
        # Lowest, first and largest size. Half of a receiver's buffer is window, the rest the kernel's own.
        settings["tcp_wmem"] = f"4096 {min(spec.window_bytes, 65536)} {spec.window_bytes}"
        settings["tcp_rmem"] = f"4096 {min(2 * spec.window_bytes, 131072)} {2 * spec.window_bytes}"
    script = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in settings.items())
    return ("ip", "netns", "exec", namespace, "sh", "-e", "-c", script)


def commands_to_shape(names: BedNames, host: str, rate_bytes_per_s: float | None) -> list[Command]:
    """Give the link of a host this rate, from now on."""
    return [
        _shape(names.namespace_of(host), NIC, rate_bytes_per_s),
        _shape(names.switch, port_of(names.spec.index_of(host)), rate_bytes_per_s),
    ]


def commands_to_cut(names: BedNames, host: str) -> list[Command]:
    """Pull the cable of a host: nothing leaves, nothing arrives, no process is notified."""
    return [("ip", "-n", names.switch, "link", "set", port_of(names.spec.index_of(host)), "down")]


def commands_to_mend(names: BedNames, host: str) -> list[Command]:
    """Put the cable back."""
    return [("ip", "-n", names.switch, "link", "set", port_of(names.spec.index_of(host)), "up")]


def command_to_remove(namespace: str) -> Command:
    """Take a namespace away, with its links."""
    return ("ip", "netns", "delete", namespace)


def _make_switches(spec: BedSpec) -> list[Command]:
    """Arguments of `ip` inside the switch namespace: the core, and the racks with their uplinks."""
    commands: list[Command] = [("link", "set", "lo", "up"), *_make_bridge(_CORE)]
    commands.append(("address", "add", "10.77.0.1/16", "dev", _CORE))
    for number, rack in enumerate(sorted(spec.uplinks)):
        lower, upper = f"up{number}", f"down{number}"
        commands += _make_bridge(_bridge_of(spec, rack))
        commands.append(("link", "add", lower, "type", "veth", "peer", "name", upper))
        commands += [*_plug(lower, _bridge_of(spec, rack)), *_plug(upper, _CORE)]
    return commands


def _make_bridge(name: str) -> list[Command]:
    return [
        ("link", "add", name, "mtu", str(MTU_BYTES), "type", "bridge", "mcast_snooping", "0"),
        ("link", "set", name, "addrgenmode", "none"),
        ("link", "set", name, "up"),
    ]


def _make_host(address: str) -> list[Command]:
    # Without the first rule IPv6 gives the interface a second address, which libraries that ask for "eth0" may pick.
    rules = ("link", "set", NIC, "addrgenmode", "none", "gso_max_size", str(SEGMENT_BYTES))
    up = (("link", "set", "lo", "up"), ("link", "set", NIC, "up"))
    return [rules, ("address", "add", address, "dev", NIC), *up]


def _plug(port: str, bridge: str) -> list[Command]:
    return [("link", "set", port, "addrgenmode", "none", "master", bridge), ("link", "set", port, "up")]


def _bridge_of(spec: BedSpec, rack: str) -> str:
    return f"rack{sorted(spec.uplinks).index(rack)}" if rack else _CORE


def _shape_uplinks(names: BedNames) -> list[Command]:
    rates = [names.spec.uplinks[rack] for rack in sorted(names.spec.uplinks)]
    return [
        _shape(names.switch, end, rate) for number, rate in enumerate(rates) for end in (f"up{number}", f"down{number}")
    ]


def _in_switch(names: BedNames, commands: Sequence[Command]) -> list[Command]:
    return [("ip", "-n", names.switch, *command) for command in commands]


def _shape(namespace: str, interface: str, rate_bytes_per_s: float | None) -> Command:
    start = ("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root")
    if rate_bytes_per_s is None or rate_bytes_per_s > _FASTEST_BYTES_PER_S:
        return (*start, "pfifo")
    burst_bytes = max(_BURST_BYTES, int(rate_bytes_per_s * _BURST_S))
    rate = f"{int(rate_bytes_per_s * 8)}bit"
    return (*start, "tbf", "rate", rate, "burst", f"{burst_bytes}b", "latency", f"{QUEUE_MS}ms")
