"""``remesh testbed``: hosts on this machine with shaped links, and programs on them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from remesh.cli.shown import JSON, print_json, print_table, say
from remesh.foundation.errors import ConfigError
from remesh.foundation.exit_codes import of_signal
from remesh.testbed import BedSpec, Testbed, describe_rate, known_testbeds as known_testbeds, parse_rate
from remesh.testbed.network_namespaces import clean as clean_leftovers

_MASTER_PORT = "29500"
_POLL_S = 0.05
_GRACE_S = 5.0


@click.group()
def testbed() -> None:
    """Make hosts on this machine: network namespaces with shaped links. Needs root and iproute2."""


@testbed.command(
    "run",
    short_help="Start a program on every host.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--hosts", default="2x200mbit", show_default=True, help="Hosts as NUMBERxRATE, as NAME=RATE,..., or as a JSON file."
)
@click.option(
    "--nproc-per-host", type=click.IntRange(1), default=1, show_default=True, help="Number of processes on each host."
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_program(hosts: str, nproc_per_host: int, program: str, arguments: tuple[str, ...]) -> None:
    """Start PROGRAM on every host, wait until all have ended, and remove the hosts.

    Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME
    in its environment. If one of them fails, the others are stopped, and its exit code is returned.
    """
    spec = read_spec(hosts)
    # A launcher that is terminated shall leave no host behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(of_signal(signal.SIGTERM)))
    with Testbed(spec) as bed:
        processes = []
        for rank in range(len(spec.hosts) * nproc_per_host):
            number, local_rank = divmod(rank, nproc_per_host)
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(len(spec.hosts) * nproc_per_host),
                "LOCAL_WORLD_SIZE": str(nproc_per_host),
                "MASTER_ADDR": bed.address_of(spec.names[0]),
                "MASTER_PORT": _MASTER_PORT,
            }
            processes.append(bed.start_program(spec.names[number], [program, *arguments], env=env))
        code = wait_for_all(processes)
    sys.exit(code)


@testbed.command("list")
@JSON
def list_testbeds(as_json: bool) -> None:
    """Show the testbeds on this machine and the processes that own them."""
    found = known_testbeds.find_testbeds()
    if as_json:
        beds = ({"bed": bed.label, "pid": bed.owner.pid, "is_alive": bed.is_alive, "hosts": bed.hosts} for bed in found)
        print_json(list(beds))
        return
    if not found:
        say("no testbed on this machine")
        return
    rows = []
    for bed in found:
        owner = f"process {bed.owner.pid}" if bed.is_alive else f"process {bed.owner.pid}, dead: `remesh testbed clean`"
        rows.append((bed.label, owner, ", ".join(bed.hosts)))
    print_table(("bed", "owner", "hosts"), rows)


@testbed.command("link", short_help="Change a link of a testbed in use.")
@click.argument("host")
@click.option(
    "--bed", default="", help="Name of the testbed, as `list` shows it; may be left out if there is only one."
)
@click.option("--rate", help="New rate in each direction, as in 100mbit, or full.")
@click.option("--cut", "state", flag_value="cut", help="Cut the link: no packet passes.")
@click.option("--mend", "state", flag_value="mend", help="Restore a link that was cut.")
def change_link(host: str, bed: str, rate: str | None, state: str | None) -> None:
    """Change the link of HOST in a testbed that is in use."""
    if (rate is None) == (state is None):
        raise ConfigError(f"changing the link of {host!r}: expected one of --rate, --cut and --mend; give one")
    chosen = known_testbeds.choose_testbed(bed)
    if rate is not None:
        known_testbeds.set_rate(chosen, host, parse_rate(rate))
        say(f"{host}: {describe_rate(parse_rate(rate))}")
    elif state == "cut":
        known_testbeds.cut(chosen, host)
        say(f"{host}: cut off")
    else:
        known_testbeds.mend(chosen, host)
        say(f"{host}: mended")


@testbed.command("clean", short_help="Remove the testbeds of dead owners.")
def clean() -> None:
    """Remove the testbeds of owners that are dead, and kill what still runs on them."""
    removed = clean_leftovers()
    say(f"removed {len(removed)} namespaces of dead owners" if removed else "nothing left behind by dead owners")


def read_spec(text: str) -> BedSpec:
    """The testbed that a JSON file or a short text describes."""
    if not text.endswith(".json"):
        return BedSpec.parse(text)
    try:
        return BedSpec.from_json(json.loads(Path(text).read_text()))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"reading testbed {text!r}: {error}; give a readable JSON file") from error


def wait_for_all(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all; when one fails, end the others and return its exit code (128 + n for signal n)."""
    codes = [process.poll() for process in processes]
    while None in codes and not any(codes):
        time.sleep(_POLL_S)
        codes = [process.poll() for process in processes]
    failed = next((code for code in codes if code), 0)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(deadline_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return failed if failed >= 0 else of_signal(-failed)
