"""``remesh plan`` says what a move would cost, draws it, and refuses what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from remesh.cli import main
from remesh.cli.plan import build_move, parse_shape, parse_side
from remesh.foundation.errors import ConfigError
from remesh.resharding import Plan
from remesh.resharding.model.network import HostLink, Network


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


CASE_6 = ("--shape", "768,64", "--src", "S0R@2x4", "--dst", "S0R@3x4")


def test_tasks_bound_ratio_and_rounds_are_printed() -> None:
    result = plan(*CASE_6)
    assert result.exit_code == 0, result.output
    for text in ("4 unit tasks", "host0 (4 devices)", "98,304 bytes", "certified ratio", "rounds", "host2 in "):
        assert text in result.output


def test_pictures_traces_and_plans_are_written(tmp_path: Path) -> None:
    svg, trace, out = (tmp_path / name for name in ("plan.svg", "trace.json", "plan.json"))
    result = plan(*CASE_6, "--svg", str(svg), "--trace", str(trace), "--out", str(out))
    assert result.exit_code == 0, result.output
    ElementTree.fromstring(svg.read_text())
    made = Plan.from_json(json.loads(out.read_text()))
    sent = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(sent) == 2 * len(made.messages)
    assert made.digest[:16] in result.output


def test_other_strategies_are_compared_when_asked_for() -> None:
    result = plan(*CASE_6, "--compare", "--strategy", "naive")
    assert result.exit_code == 0, result.output
    for name in ("send_recv", "global_allgather", "broadcast", "dfs", "alpa"):
        assert name in result.output


def test_a_network_file_gives_hosts_and_times(tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    network = Network({"fast": HostLink(2e6), "slow": HostLink(1e6)}, latency_s=1e-4)
    file.write_text(json.dumps(network.to_json()))
    result = plan("--shape", "1000000", "--dtype", "int8", "--src", "R@1", "--dst", "R@1", "--network", str(file))
    assert result.exit_code == 0, result.output
    assert "fast out" in result.output
    assert "1 s on this network" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--shape", "8", "--src", "S0@4", "--dst", "nonsense"), "reading --dst 'nonsense': expected SPEC@MESH"),
        (("--shape", "8;8", "--src", "S0@4", "--dst", "R@4"), "reading --shape '8;8'"),
        (("--shape", "8", "--src", "S0R@4", "--dst", "R@4"), "it has 2 dims"),
        (("--shape", "8", "--src", "S1@4", "--dst", "R@4"), "mesh axis 1"),
        (("--shape", "8", "--src", "S0@4", "--dst", "R@4", "--hosts", "a,b"), "they need 8 hosts, found 2 host names"),
        (("--shape", "8", "--src", "S0@4", "--dst", "R@4", "--network", "missing.json"), "missing.json"),
        (("--shape", "8", "--src", "S0@4", "--dst", "R@4", "--dtype", "float31"), "float31"),
        (("--shape", "8", "--src", "S0@4", "--dst", "R@4", "--svg", "missing/x.svg"), "writing missing"),
    ],
)
def test_what_makes_no_sense_is_one_message(arguments: tuple[str, ...], text: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def test_a_network_file_that_is_damaged_or_lacks_hosts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    for content, text in (("{", "it is not JSON"), ("{}", "expected format"), (json.dumps(Network({}).to_json()), "8")):
        file.write_text(content)
        result = plan("--shape", "8", "--src", "S0@4", "--dst", "R@4", "--network", str(file))
        assert result.exit_code == 2, result.output
        assert text in result.output


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    result = plan("--shape", "8", "--src", "S0@4", "--dst", "R@4", "--strategy", "fastest")
    assert result.exit_code == 2
    assert "broadcast" in result.output


def test_sides_say_spec_mesh_and_hosts() -> None:
    side = parse_side("S01R@2x4:3", "src", 0)
    assert (side.spec, side.mesh_shape, side.first_host, side.num_hosts, side.devices_per_host) == (
        *("S01R", (2, 4), 3, 2, 4),
    )
    assert parse_side("@4", "src", 7).num_hosts == 4
    assert parse_side("@4", "src", 7).first_host == 7
    for text in ("S0@", "S0@0", "S0@2x", "@9999999", "S0@99999x99999", "x@2"):
        with pytest.raises(ConfigError):
            parse_side(text, "src", 0)
    assert parse_shape("") == ()
    assert parse_shape("8, 4") == (8, 4)


def test_meshes_may_share_hosts_with_other_numbers_of_devices() -> None:
    move, host_of = build_move((8, 8), "int8", "S0R@2x4", "RS0@1x2:1", None)
    assert host_of == {0: "host0", 1: "host0", 2: "host0", 3: "host0"} | dict.fromkeys(range(4, 8), "host1")
    assert move.dst.holders == (4, 5)


def test_thousands_of_ranks_are_told_without_naming_what_they_exchange() -> None:
    result = plan("--shape", "1024,1024", "--src", "S01R@128x8", "--dst", "RS01@128x8")
    for text in ("1048576 unit tasks", "... 1048560 more", "[15:16, 0:1]", "1,048,576 messages", "1.0000"):
        assert text in result.output, text
