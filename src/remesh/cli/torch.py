"""``remesh torch``: checkpoints of unmodified torch.distributed programs, and restarts elsewhere."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from remesh.carried.hosts.host_list import count_ranks, parse_hosts
from remesh.carried.hosts.job_hosts import make_testbed
from remesh.carried.hosts.slurm import BatchLaunch, make_script
from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.carried.torch.torch_job import KIND, TorchPlacement, TorchSettings, run_job_once
from remesh.cli.job_options import CHECKPOINTS, HOSTS, JOB, MAX_RESTARTS, RESTART, with_options
from remesh.cli.job_verbs import checkpoint_job, jobs_root, lead_job, list_jobs, refuse_if_running, show
from remesh.cli.shown import print_document, say
from remesh.foundation.errors import ConfigError

_OF_TORCHRUN = (
    *("num_hosts", "ranks_per_host", "node_rank", "standalone", "run_id", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint"),
)
_ONE_COMMAND = "Only 0: one command starts the ranks of all hosts, which --hosts names."
_NO_MEETING = "Accepted, and not needed: ranks connect to the process that starts them."


@click.group()
def torch() -> None:
    """Checkpoint unmodified torch.distributed programs; restart them on other hosts, ports and interfaces."""


_INTERFACE = click.option(
    "--interface",
    default="",
    help="Network interface for gloo, on every host; by default GLOO_SOCKET_IFNAME, or else the one that leads to the "
    "other hosts.",
)
_how = with_options(*HOSTS, _INTERFACE, *CHECKPOINTS, MAX_RESTARTS)


@torch.command(
    "run",
    short_help="Start a script on all hosts.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--nnodes", "num_hosts", default="1", show_default=True,
              help="Number of hosts, as torchrun has it; with more than one, --hosts names them.")  # fmt: skip
@click.option("--nproc-per-node", "--nproc_per_node", "ranks_per_host", default="1", show_default=True,
              help="Number of ranks on each host to which --hosts gives none; auto, cpu, gpu or xpu: as many as this "
              "host has.")  # fmt: skip
@click.option("--node-rank", "--node_rank", type=click.IntRange(0), default=0, help=_ONE_COMMAND)
@click.option("--rdzv-backend", "--rdzv_backend", type=click.Choice(["static", "c10d"]), help=_NO_MEETING)
@click.option("--rdzv-endpoint", "--rdzv_endpoint", help=_NO_MEETING)
@click.option("--rdzv-id", "--rdzv_id", "run_id", help="Value of TORCHELASTIC_RUN_ID for the program.")
@click.option("--master-addr", "--master_addr", help="Value of MASTER_ADDR for the program; no process listens there.")
@click.option(
    "--master-port", "--master_port", type=click.IntRange(1, 65535), help="Value of MASTER_PORT for the program."
)
@click.option("--standalone", is_flag=True, help="One host, as torchrun has it.")
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@JOB
@_how
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_job(
    is_module: bool, job_path: Path | None, script: str, arguments: tuple[str, ...], hosts: str | None,
    testbed: str | None, interface: str, max_restarts: int, **how: Any,
) -> None:  # fmt: skip
    """Start SCRIPT as torchrun does, on all hosts by this one command; SIGTERM takes a checkpoint and stops."""
    if script.startswith("-"):
        raise ConfigError(f"starting a program: no such option {script}; see `remesh torch run --help`")
    if not is_module and not Path(script).is_file():
        raise ConfigError(
            f"starting {script}: no such file in {os.getcwd()}; name a Python script, or a module with -m"
        )
    num_ranks, environment = _read_torchrun(hosts, **{name: how.pop(name) for name in _OF_TORCHRUN})
    name = script.replace(".", "-") if is_module else Path(script).stem
    path = job_path or jobs_root() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    argv = (*(("-m",) if is_module else ()), script, *arguments)
    spec = JobSpec(argv, num_ranks, os.getcwd(), {**os.environ, **environment}, kind=KIND)
    placement = _place(hosts, num_ranks, testbed, interface)
    settings = TorchSettings(**how)
    folder = JobFolder.create(path.absolute(), spec)
    say(f"remesh: job {folder.path}", err=True)
    lead_job(partial(run_job_once, folder, placement, settings), folder, None, max_restarts)


def _read_torchrun(
    hosts: str | None, *, num_hosts: str, ranks_per_host: str, node_rank: int, standalone: bool, **others: Any
) -> tuple[int, dict[str, str]]:
    """The number of ranks, and what torchrun's flags put into the environment of programs."""
    doing = f"starting a program with --nnodes {num_hosts}"
    if not num_hosts.isdecimal() or num_hosts == "0":
        raise ConfigError(f"{doing}: expected one number, since a job keeps its ranks; `remesh run` is elastic")
    if node_rank:
        raise ConfigError(
            f"{doing} --node-rank {node_rank}: expected 0, since one command starts the ranks of all hosts; name them "
            "with --hosts"
        )
    named = 1 if hosts is None else len(hosts.split(","))
    if int(num_hosts) not in (1, named) or (standalone and named > 1):
        what = "--standalone is for one" if standalone else f"{named} {'is' if named == 1 else 'are'} named"
        raise ConfigError(f"{doing}: {what}; name each host, as in --hosts a:2,b:2")
    given = {
        "TORCHELASTIC_RUN_ID": others["run_id"],
        "MASTER_ADDR": others["master_addr"],
        "MASTER_PORT": others["master_port"],
    }
    environment = {name: str(value) for name, value in given.items() if value is not None}
    per_host = _count_ranks_of_a_host(ranks_per_host, named)
    return per_host if hosts is None else count_ranks(hosts, per_host), environment


def _count_ranks_of_a_host(text: str, num_hosts: int) -> int:
    """The number of ranks that ``--nproc-per-node`` gives a host; a word asks torch what this host has."""
    if text.isdecimal() and int(text):
        return int(text)
    if num_hosts > 1 and text.isalpha():
        raise ConfigError(
            f"starting a program with --nproc-per-node {text} on {num_hosts} hosts: this command sees its own "
            "host, and not the others; give numbers, as in --hosts a:2,b:2"
        )
    from remesh.elasticity.launch.request import num_workers  # noqa: PLC0415  loads torch, which a number does not need

    return num_workers(text)


def _place(hosts: str | None, num_ranks: int, testbed: str | None, interface: str) -> TorchPlacement:
    placed = () if hosts is None else parse_hosts(hosts, num_ranks)
    if testbed is not None:
        make_testbed(placed, testbed)
    return TorchPlacement(placed, testbed, interface)


@torch.command("restart", short_help="Continue a job from a checkpoint.")
@click.argument("job")
@with_options(*RESTART)
@_how
def restart_job(
    job: str, number: int | None, open_files: str, hosts: str | None, testbed: str | None, interface: str,
    max_restarts: int, **how: Any,
) -> None:  # fmt: skip
    """Continue JOB from a checkpoint on the given hosts, on other ports and perhaps another interface."""
    folder = JobFolder.find(job, jobs_root())
    folder.refuse_other_kind(KIND)
    checkpoint = folder.checkpoint(number)
    settings = TorchSettings(open_files=OpenFilePolicy(open_files), **how)
    placement = _place(hosts, folder.read_spec().num_ranks, testbed, interface)
    refuse_if_running(folder)
    lead_job(partial(run_job_once, folder, placement, settings), folder, checkpoint, max_restarts)


for _verb in (checkpoint_job, list_jobs, show):
    torch.add_command(_verb)


@torch.command(
    "slurm", short_help="Print a batch script for Slurm.", context_settings={"allow_interspersed_args": False}
)
@click.option("-n", "num_ranks", type=click.IntRange(1), required=True, help="Number of ranks on all hosts together.")
@click.option("--job", "job_path", required=True, help="Folder of the job, on a shared file system.")
@_INTERFACE
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def slurm_script(
    num_ranks: int, job_path: str, interface: str, is_module: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Print a batch script for Slurm that starts SCRIPT, or continues it from its newest checkpoint."""
    launch = BatchLaunch("torch", options=("--interface", interface) if interface else ())
    command = (*(("-m",) if is_module else ()), script, *arguments)
    print_document(make_script(num_ranks, launch, job_path, command))
