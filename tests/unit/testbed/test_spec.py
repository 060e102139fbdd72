"""Descriptions of testbeds: what is refused, what survives a round trip, what names tell."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from remesh.foundation.errors import ConfigError
from remesh.testbed import BedSpec, HostSpec, describe_rate, parse_rate
from remesh.testbed.testbed_spec import MAX_HOSTS, NamespaceName, Owner

names = st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True)
rates = st.none() | st.floats(1e3, 1e12)


@st.composite
def bed_specs(draw: st.DrawFn) -> BedSpec:
    racks = draw(st.lists(names, max_size=3, unique=True))
    chosen = draw(st.lists(names, min_size=max(len(racks), 1), max_size=6, unique=True))
    places = [*racks, *(draw(st.sampled_from(["", *racks])) for _ in chosen[len(racks) :])]
    hosts = tuple(HostSpec(name, draw(rates), rack) for name, rack in zip(chosen, places, strict=True))
    window_bytes = draw(st.none() | st.integers(1 << 13, 1 << 30))
    return BedSpec(hosts, {rack: draw(rates) for rack in racks}, draw(st.sampled_from(["reno", "bbr"])), window_bytes)


@given(bed_specs())
def test_a_bed_read_back_equals_the_one_written(spec: BedSpec) -> None:
    assert BedSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("200mbit", 25e6),
        ("1gbit", 125e6),
        ("64kbps", 64e3),
        ("9600bit", 1200.0),
        ("1.5 mbit".replace(" ", ""), 187500.0),
    ],
)
def test_rates_are_read_as_tc_reads_them(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


def test_full_speed_is_no_rate() -> None:
    assert parse_rate("full") is None
    assert describe_rate(None) == "full speed"
    assert describe_rate(25e6) == "200 Mbit/s"


@pytest.mark.parametrize("text", ["", "200", "mbit", "200 mb", "-1mbit", "200mbits", "nan"])
def test_what_is_no_rate_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match="as in 200mbit"):
        parse_rate(text)


def test_short_texts_describe_equal_and_uneven_hosts() -> None:
    assert BedSpec.parse("3x200mbit") == BedSpec.uniform(3, 25e6)
    uneven = BedSpec.parse("trainer=1gbit, generator=full")
    assert uneven.hosts == (HostSpec("trainer", 125e6), HostSpec("generator", None))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: BedSpec(()), "0 hosts, expected 1 to"),
        (lambda: BedSpec.uniform(MAX_HOSTS + 1, None), f"{MAX_HOSTS + 1} hosts"),
        (lambda: HostSpec("Host", 1e6), "lower case"),
        (lambda: HostSpec("a;reboot", 1e6), "lower case"),
        (lambda: HostSpec("a", 0.0), "expected at least 1000"),
        (lambda: HostSpec("a", float("nan")), "expected at least 1000"),
        (lambda: BedSpec((HostSpec("a", 1e6), HostSpec("a", 1e6))), "'a' appears twice"),
        (lambda: BedSpec((HostSpec("a", 1e6, "r"),)), "uplinks are given for"),
        (lambda: BedSpec((HostSpec("a", 1e6),), {"r": 1e6}), "uplinks are given for"),
        (lambda: BedSpec((HostSpec("a", 1e6),), congestion_control="x y"), "congestion control"),
        (lambda: BedSpec((HostSpec("a", 1e6),), window_bytes=1), "window of 1 bytes"),
        (lambda: BedSpec.parse("4 hosts"), "as in 4x200mbit"),
        (lambda: BedSpec.uniform(2, 1e6).index_of("host7"), "it has host0, host1"),
    ],
)
def test_a_bed_that_cannot_be_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"hosts": {}},
        {"hosts": [1]},
        {"hosts": [{"name": "a"}]},
        {"hosts": [{"name": "a", "rate_bytes_per_s": "fast"}]},
        {"hosts": [{"name": "a", "rate_bytes_per_s": True}]},
        {"hosts": [{"name": "a", "rate_bytes_per_s": 1e6, "speed": 1}]},
        {"hosts": [{"name": "a", "rate_bytes_per_s": 1e6}], "uplinks": {"r": 1e6}},
        {"hosts": [{"name": "a", "rate_bytes_per_s": 1e6}], "window_bytes": "large"},
        {"hosts": [{"name": "a", "rate_bytes_per_s": 1e6}], "congestion_control": 1},
    ],
)
def test_a_file_that_describes_no_bed_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        BedSpec.from_json(value)


@given(st.integers(1, 1 << 22), st.integers(0, 1 << 40), st.integers(0, 99), st.integers(0, 999), names)
def test_a_namespace_name_tells_its_owner_bed_and_host(pid: int, ticks: int, bed: int, index: int, host: str) -> None:
    for name in (NamespaceName(Owner(pid, ticks), bed, index, host), NamespaceName(Owner(pid, ticks), bed, None)):
        assert NamespaceName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text", ["", "remesh", "docker-1", "remesh-1-2-3-switch-a", "remesh-1-2-3-4", "xremesh-1-2-3-switch"]
)
def test_namespaces_of_others_are_left_alone(text: str) -> None:
    assert NamespaceName.parse(text) is None
