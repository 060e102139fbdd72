"""``remesh net``: what the network between hosts can do, as a file that `remesh plan --network` reads."""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import click
import torch.distributed as dist

from remesh.cli.shown import JSON, print_json, print_table, say, waiting
from remesh.cli.small_files import OutputFile
from remesh.foundation.errors import ConfigError
from remesh.resharding.model.network import HostLink, Network
from remesh.testbed import BedSpec, Testbed, describe_rate
from remesh.testbed.probe import Measured, probe

_TIMEOUT_S = 600.0
_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@click.group()
def net() -> None:
    """Measure the network between hosts."""


@net.command("probe", short_help="Measure rates and latency, and write a network file.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--seconds", type=click.FloatRange(0.01, 60.0), default=0.5, show_default=True, help="Duration of each measurement."
)
@click.option("--testbed", "bed", metavar="HOSTS", help="Measure hosts on this machine, as in 4x200mbit; needs root.")
@JSON
@click.pass_context
def run_probe(ctx: click.Context, file: Path, seconds: float, bed: str | None, as_json: bool) -> None:
    """Measure rates and latency between hosts and write them to FILE (JSON).

    Every host runs it, started by a launcher that gives each its rank, such as

    \b
        torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d \\
          --rdzv-endpoint head:29400 --no-python remesh net probe network.json

    Ranks with one host name share a host. Two ranks per host measure the inside of the host, too. The first rank writes
    the file. GLOO_SOCKET_IFNAME chooses the interface.
    """
    is_first = bed is not None or os.environ.get("RANK", "0") == "0"
    output = ctx.with_resource(closing(OutputFile(file))) if is_first else None
    if bed is not None:
        with waiting(f"measuring {bed}"), Testbed(BedSpec.parse(bed)) as testbed:
            measured = testbed.run(probe, args=(seconds,), timeout_s=_TIMEOUT_S)[0]
    else:
        measured = _probe_launched(seconds)
    if output is None:
        return
    form = network_of(measured).to_json()
    if as_json:
        print_json(form)
    else:
        show(measured)
    output.write(json.dumps(form, indent=1) + "\n", err=as_json)


def network_of(measured: Measured) -> Network:
    """The network that was measured, each host with the smaller of its two rates."""
    hosts = {}
    for each in measured.hosts:
        rate = min(each.out_bytes_per_s, each.in_bytes_per_s)
        local = each.local_bytes_per_s
        hosts[each.host] = HostLink(rate, local_rate_bytes_per_s=math.inf if local is None else local)
    return Network(hosts, latency_s=measured.latency_s)


def show(measured: Measured) -> None:
    """Print what was measured as a table."""
    rows = []
    for each in measured.hosts:
        inside = "-" if each.local_bytes_per_s is None else describe_rate(each.local_bytes_per_s)
        rows.append((each.host, describe_rate(each.out_bytes_per_s), describe_rate(each.in_bytes_per_s), inside))
    print_table(("host", "out", "in", "inside"), rows)
    say(f"latency {measured.latency_s * 1e6:.0f} us")


def _probe_launched(seconds: float) -> Measured:
    absent = [name for name in _LAUNCH if name not in os.environ]
    if absent:
        raise ConfigError(
            f"measuring links: {', '.join(absent)} not in the environment, expected a launcher to set them; start it "
            "with torchrun on every host, or measure a testbed with --testbed"
        )
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        return probe(seconds)
    finally:
        dist.destroy_process_group()
