"""A testbed that cannot be made says so before it touches anything."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from remesh.cli import main
from remesh.cli.net import network_of
from remesh.foundation.errors import ConfigError
from remesh.testbed import BedSpec, Testbed
from remesh.testbed.network_namespaces import is_alive, make_folder, remove_folders_of_the_dead, this_owner
from remesh.testbed.probe import HostRates, Measured
from remesh.testbed.testbed_spec import Owner


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has the tools and is used by somebody who is not root."""
    monkeypatch.setattr(shutil, "which", lambda tool: f"bin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_without_root_a_bed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runs as user 1000, expected root.*sudo"):
        Testbed(BedSpec.uniform(2, None)).start()


@pytest.mark.parametrize("absent", ["ip", "tc"])
def test_without_a_tool_a_bed_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == absent else f"bin/{tool}")
    with pytest.raises(ConfigError, match=f"{absent!r} is not on the path.*install the package iproute2"):
        Testbed(BedSpec.uniform(2, None)).start()


def test_a_bed_that_is_not_started_says_so() -> None:
    bed = Testbed(BedSpec.uniform(2, None))
    with pytest.raises(ConfigError, match="not started"):
        bed.cut("host0")
    bed.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["testbed", "run", "true"], "expected root"),
        (["testbed", "run", "--hosts", "two", "true"], "as in 4x200mbit"),
        (["testbed", "run", "--hosts", "absent.json", "true"], "give a readable JSON file"),
        (["testbed", "link", "host0"], "expected one of --rate, --cut and --mend"),
        (["testbed", "link", "host0", "--cut", "--bed", "0.0"], "0 fit, expected one"),
        (["net", "probe", "out.json", "--testbed", "2x1mbit"], "expected root"),
        (["net", "probe", "out.json"], "start it with torchrun"),
    ],
)
def test_the_command_line_refuses_in_one_message(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert "Traceback" not in result.output


def test_this_process_is_alive_and_an_earlier_one_of_its_id_is_not() -> None:
    owner = this_owner()
    assert is_alive(owner)
    assert not is_alive(Owner(owner.pid, owner.started_ticks - 1))
    assert not is_alive(Owner(1 << 23, owner.started_ticks))


def test_the_folder_of_a_dead_owner_is_removed_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = this_owner()
    mine, dead = make_folder(owner), make_folder(Owner(owner.pid, owner.started_ticks - 1))
    foreign = tmp_path / "remesh-testbed-of-somebody"
    foreign.mkdir()
    remove_folders_of_the_dead()
    assert sorted(tmp_path.iterdir()) == sorted([mine, foreign]) and not dead.exists()


def test_a_measured_network_has_the_smaller_rate_of_each_host() -> None:
    measured = Measured((HostRates("a", 2e6, 1e6, None), HostRates("b", 1e6, 3e6, 5e9)), latency_s=1e-4)
    network = network_of(measured)
    assert [network.hosts[host].rate_bytes_per_s for host in "ab"] == [1e6, 1e6]
    assert network.hosts["b"].local_rate_bytes_per_s == 5e9
    assert network.latency_s == 1e-4
