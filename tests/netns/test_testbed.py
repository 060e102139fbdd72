"""Beds on this machine: hosts are apart, links have their rates and can be hurt, nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from remesh.foundation.errors import ConfigError
from remesh.foundation.linux.procfs import start_of
from remesh.testbed import BedSpec, RanksFailed, Testbed
from remesh.testbed.network_namespaces import FOLDER, find_namespaces, processes_in
from remesh.testbed.probe import Measured, probe

pytestmark = pytest.mark.netns

RATE = 12.5e6
"""100 Mbit/s."""


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(BedSpec.parse("a=100mbit,b=100mbit,c=25mbit")) as made:
        yield made


def tell_about_myself() -> tuple[int, str, str, str]:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return dist.get_rank(), socket.gethostname(), os.environ["GLOO_SOCKET_IFNAME"], socket.gethostbyname("b")


def test_ranks_run_host_by_host_each_under_the_name_of_its_host(bed: Testbed) -> None:
    told = bed.run(tell_about_myself, 2)
    assert [(rank, host) for rank, host, *_ in told] == list(bed.hosts_of_ranks(2).items())
    assert {nic for *_, nic, _ in told} == {"eth0"}
    assert {address for *_, address in told} == {bed.address_of("b")}


def test_hosts_may_have_different_numbers_of_ranks(bed: Testbed) -> None:
    told = bed.run(tell_about_myself, {"c": 1, "a": 2})
    assert [host for _, host, *_ in told] == ["a", "a", "c"]
    with pytest.raises(ConfigError, match="it has a, b, c"):
        bed.run(tell_about_myself, {"d": 1})


def pass_bytes(num_bytes: int, giver: int = 0, taker: int = 1) -> float:
    """Seconds until the bytes are at the taker."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    started_s = time.perf_counter()
    if dist.get_rank() == giver:
        dist.send(buffer, taker)
    elif dist.get_rank() == taker:
        dist.recv(buffer, giver)
    dist.barrier()
    return time.perf_counter() - started_s


def test_a_link_carries_its_rate_and_the_slower_end_of_two_decides(bed: Testbed) -> None:
    num_bytes = 2 << 20
    fast = max(bed.run(pass_bytes, args=(num_bytes,)))
    slow = max(bed.run(pass_bytes, args=(num_bytes, 0, 2)))
    # A link is never faster than it is shaped to be, but for the first burst; a busy machine may make it slower.
    assert fast > 0.9 * num_bytes / RATE
    assert slow > 0.9 * num_bytes / (RATE / 4)


def namespace_of(host: str) -> str:
    return next(str(name) for name in find_namespaces() if name.owner.pid == os.getpid() and name.host == host)


def test_a_rate_can_be_changed_and_changed_back(bed: Testbed) -> None:
    num_bytes = 2 << 20
    bed.set_rate("b", RATE / 4)
    slow = max(bed.run(pass_bytes, args=(num_bytes,)))
    bed.set_rate("b", RATE)
    assert slow > 0.9 * num_bytes / (RATE / 4)
    shaped = subprocess.run(
        ["tc", "-n", namespace_of("b"), "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True
    )
    assert "rate 100Mbit" in shaped.stdout


def test_interface_counters_tell_what_was_sent(bed: Testbed) -> None:
    num_bytes = 4 << 20
    before = {host: bed.nic_bytes(host) for host in bed.spec.names}
    bed.run(pass_bytes, args=(num_bytes,))
    moved = {host: bed.nic_bytes(host) - before[host] for host in bed.spec.names}
    for carried in (moved["a"].sent, moved["b"].received):
        assert num_bytes < carried < 1.1 * num_bytes
    assert moved["c"].sent + moved["c"].received < 0.02 * num_bytes


def beat(num_beats: int) -> list[float]:
    """When each small all-reduce was done."""
    done = []
    for _ in range(num_beats):
        dist.all_reduce(torch.ones(1))
        done.append(time.monotonic())
        time.sleep(0.05)
    return done


def test_a_cut_host_is_silent_until_it_is_mended(bed: Testbed) -> None:
    with bed.start_ranks(beat, args=(40,), timeout_s=60) as run:
        time.sleep(1.0)
        bed.cut("b")
        cut_s = time.monotonic()
        time.sleep(1.0)
        bed.mend("b")
        mended_s = time.monotonic()
        times = run.wait()[0]
    during = [at for at in times if cut_s + 0.2 < at < mended_s]
    assert not during
    assert max(times) > mended_s, "all beats were over before the link was cut"


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the model is empty")
    dist.barrier()


def wait_for_ever() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def test_a_rank_that_raises_is_told_with_its_host_and_traceback(bed: Testbed) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 on b raised.*raise_on_one.*the model is empty"):
        bed.run(raise_on_one)


def test_a_hang_ends_with_the_stacks(bed: Testbed) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 on a stuck.*wait_for_ever"):
        bed.run(wait_for_ever, timeout_s=3)


def wait_for_peers() -> str:
    try:
        dist.barrier()
        if dist.get_rank() == 2:
            time.sleep(1000)
        dist.barrier()
    except RuntimeError:
        return "noticed"
    return "nothing happened"


def test_a_killed_rank_has_no_result_and_the_others_go_on(bed: Testbed) -> None:
    with bed.start_ranks(wait_for_peers, timeout_s=30) as run:
        time.sleep(1.5)
        run.kill(2)
        results = run.wait()
    assert results[2] is None
    assert "noticed" in results


def test_programs_run_on_hosts_and_end_with_the_bed(tmp_path: Path) -> None:
    with Testbed(BedSpec.uniform(2, None)) as bed:
        with (tmp_path / "out").open("wb") as out:
            assert bed.start_program("host1", ["sh", "-c", "hostname; getent hosts host0"], output=out).wait(30) == 0
        assert (tmp_path / "out").read_text().split() == ["host1", bed.address_of("host0"), "host0"]
        assert bed.start_program("host1", ["no-such-program"], output=subprocess.DEVNULL).wait(30) == 127
        sleeper = bed.start_program("host0", ["sleep", "1000"])
        deadline_s = time.monotonic() + 30
        while Path(f"/proc/{sleeper.pid}/comm").read_text() != "sleep\n" and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert sleeper.wait(10) == -signal.SIGKILL


OWNER_THAT_CRASHES = """
import os, signal, subprocess, sys
from remesh.foundation.linux.procfs import start_of
from remesh.testbed import BedSpec, Testbed
if __name__ == "__main__":
    bed = Testbed(BedSpec.uniform(2, None))
    bed.start()
    if sys.argv[1] == "alone":
        bed._bed.warden.process.kill()
    sleeper = bed.start_program("host0", ["sleep", "1000"], output=subprocess.DEVNULL)
    while not open(f"/proc/{sleeper.pid}/comm").read().startswith("sleep"): pass
    print(sleeper.pid, bed._bed.folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_owner_leaves_is_cleaned_and_beds_in_use_are_not(bed: Testbed) -> None:
    mine = {str(name) for name in find_namespaces() if name.owner.pid == os.getpid()}
    assert len(mine) == 4
    with subprocess.Popen([sys.executable, "-c", OWNER_THAT_CRASHES, "alone"], stdout=subprocess.PIPE) as owner:
        assert owner.wait(60) == -signal.SIGKILL
    left = [str(name) for name in find_namespaces() if name.owner.pid == owner.pid]
    assert len(left) == 3
    assert len(processes_in(left)) == 1
    done = subprocess.run(
        [sys.executable, "-m", "remesh", "testbed", "clean"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "removed 3 namespaces" in done.stdout
    assert not [name for name in left if (FOLDER / name).exists()]
    assert not list(Path(tempfile.gettempdir()).glob(f"remesh-testbed-{owner.pid}-*"))
    assert mine <= {str(name) for name in find_namespaces()}


def test_a_killed_owner_leaves_nothing(bed: Testbed) -> None:
    mine = {str(name) for name in find_namespaces() if name.owner.pid == os.getpid()}
    command = [sys.executable, "-c", OWNER_THAT_CRASHES, "with its warden"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        sleeper, folder = owner.stdout.readline().split()
        assert owner.wait(60) == -signal.SIGKILL
    deadline_s = time.monotonic() + 60
    while Path(folder).exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not Path(folder).exists() and start_of(int(sleeper)) is None
    assert not [name for name in find_namespaces() if name.owner.pid == owner.pid]
    assert mine <= {str(name) for name in find_namespaces()}


def test_the_command_line_runs_programs_and_hands_on_their_exit_code() -> None:
    command = [sys.executable, "-m", "remesh", "testbed", "run", "--hosts", "2x100mbit", "--nproc-per-host", "2"]
    done = subprocess.run([*command, "sh", "-c", "echo $RANK $(hostname)"], capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["0 host0", "1 host0", "2 host1", "3 host1"]
    done = subprocess.run([*command, "sh", "-c", "test $RANK != 2 || exit 3; sleep 1000"], timeout=60)
    assert done.returncode == 3


def test_another_process_can_list_a_bed_and_hurt_its_links(bed: Testbed) -> None:
    label = next(f"{name.owner.pid}.{name.bed}" for name in find_namespaces() if name.owner.pid == os.getpid())
    listed = subprocess.run(
        [sys.executable, "-m", "remesh", "testbed", "list"], capture_output=True, text=True, timeout=60, check=True
    )
    assert label in listed.stdout
    link = [sys.executable, "-m", "remesh", "testbed", "link", "c", "--bed", label]
    subprocess.run([*link, "--rate", "10mbit"], timeout=60, check=True)
    num_bytes = 1 << 20
    assert max(bed.run(pass_bytes, args=(num_bytes, 0, 2))) > 0.9 * num_bytes / 1.25e6
    for state in ("--cut", "--mend"):
        subprocess.run([*link, state], timeout=60, check=True)
    bed.set_rate("c", RATE / 4)


def test_a_bed_that_the_kernel_refuses_leaves_nothing_behind() -> None:
    spec = BedSpec(BedSpec.uniform(2, None).hosts, congestion_control="no_such_rule")
    with pytest.raises(ConfigError, match="no_such_rule"):
        Testbed(spec).start()
    assert not [name for name in find_namespaces() if name.host == "host1" and name.owner.pid == os.getpid()]


def test_the_probe_finds_the_rates_of_uneven_hosts(bed: Testbed) -> None:
    measured: list[Measured] = bed.run(probe, args=(0.2,), timeout_s=100)
    assert measured[0] == measured[2]
    rates = {each.host: min(each.out_bytes_per_s, each.in_bytes_per_s) for each in measured[0].hosts}
    # Never more than the link has; how much less is a matter of how busy the machine is.
    assert rates["a"] < 1.1 * RATE
    assert rates["c"] < 1.1 * RATE / 4
    assert rates["c"] < rates["a"]
    assert 0 < measured[0].latency_s < 1


def test_a_rack_is_held_back_by_its_uplink() -> None:
    value = {
        "hosts": [
            {"name": "a", "rate_bytes_per_s": RATE, "rack": "r"},
            {"name": "b", "rate_bytes_per_s": RATE, "rack": "r"},
            {"name": "c", "rate_bytes_per_s": RATE},
        ],
        "uplinks": {"r": RATE / 4},
    }
    num_bytes = 1 << 20
    with Testbed(BedSpec.from_json(value)) as bed:
        bed.run(pass_bytes, args=(num_bytes, 0, 1))
        across = max(bed.run(pass_bytes, args=(num_bytes, 0, 2)))
    assert across > 0.9 * num_bytes / (RATE / 4)
