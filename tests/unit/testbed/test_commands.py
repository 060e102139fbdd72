"""The commands that make a bed, as text: nothing here runs one."""

from __future__ import annotations

from remesh.testbed import BedSpec, HostSpec
from remesh.testbed.commands import (
    BedNames,
    command_to_remove,
    commands_to_cut,
    commands_to_make,
    commands_to_mend,
    commands_to_shape,
)
from remesh.testbed.testbed_spec import MAX_HOSTS, Owner

OWNER = Owner(7, 99)


def names_of(spec: BedSpec) -> BedNames:
    return BedNames(spec, OWNER, 0)


def test_every_host_has_an_address_of_its_own() -> None:
    names = names_of(BedSpec.uniform(MAX_HOSTS, None))
    addresses = [names.address_of(host) for host in names.spec.names]
    assert len({*addresses, names.switch_address}) == MAX_HOSTS + 1
    assert all(0 < int(part) < 255 for address in addresses for part in address.split(".")[3:])


def test_a_link_is_shaped_at_both_ends() -> None:
    names = names_of(BedSpec.uniform(2, 25e6))
    shaped = [" ".join(command) for command in commands_to_shape(names, "host1", 25e6)]
    assert shaped == [
        "tc -n remesh-7-99-0-1-host1 qdisc replace dev eth0 root tbf rate 200000000bit burst 65536b latency 100ms",
        "tc -n remesh-7-99-0-switch qdisc replace dev port1 root tbf rate 200000000bit burst 65536b latency 100ms",
    ]


def test_a_link_without_a_rate_is_not_shaped() -> None:
    for rate in (None, 1e12):
        commands = commands_to_shape(names_of(BedSpec.uniform(1, None)), "host0", rate)
        assert all(command[-1] == "pfifo" for command in commands)


def test_the_bucket_of_a_fast_link_holds_a_millisecond() -> None:
    (command, _) = commands_to_shape(names_of(BedSpec.uniform(1, None)), "host0", 1.25e9)
    assert command[command.index("burst") + 1] == "1250000b"


def test_what_is_made_inside_the_bed_stays_inside() -> None:
    spec = BedSpec((HostSpec("a", 1e6, "r"), HostSpec("b", 1e6)), {"r": 2e6})
    names = names_of(spec)
    for command in commands_to_make(names):
        makes = command[:3] in (("ip", "netns", "add"), ("ip", "link", "add"))
        enters = command[1] == "-n" or command[:3] == ("ip", "netns", "exec")
        assert makes or enters, command
        assert any(part in names.namespaces for part in command), command


def test_a_rack_has_a_switch_and_a_shaped_uplink_of_its_own() -> None:
    spec = BedSpec((HostSpec("a", 1e6, "r"), HostSpec("b", 1e6)), {"r": 2e6})
    commands = [" ".join(command) for command in commands_to_make(names_of(spec))]
    assert any(command.endswith("link set port0 addrgenmode none master rack0") for command in commands)
    assert any(command.endswith("link set port1 addrgenmode none master core") for command in commands)
    for end in ("up0", "down0"):
        assert any(f"dev {end} root tbf rate 16000000bit" in command for command in commands)


def test_windows_are_capped_unless_left_to_tcp() -> None:
    spec = BedSpec.uniform(1, None)
    tuned = [command[-1] for command in commands_to_make(names_of(spec)) if "exec" in command]
    assert len(tuned) == 2
    assert all("echo 4096 65536 262144 > /proc/sys/net/ipv4/tcp_wmem" in script for script in tuned)
    free = names_of(BedSpec(spec.hosts, window_bytes=None))
    assert not any("mem" in command[-1] for command in commands_to_make(free))


def test_a_cut_is_undone_by_mending_and_a_removal_names_one_namespace() -> None:
    names = names_of(BedSpec.uniform(1, None))
    assert commands_to_cut(names, "host0") == [("ip", "-n", names.switch, "link", "set", "port0", "down")]
    assert commands_to_mend(names, "host0") == [("ip", "-n", names.switch, "link", "set", "port0", "up")]
    assert command_to_remove(names.switch) == ("ip", "netns", "delete", names.switch)
