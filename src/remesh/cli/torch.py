"""``remesh torch``: checkpoints of torch.distributed programs that know nothing of them, and restarts elsewhere."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from remesh.cli.job_verbs import checkpoint_job, jobs_root, list_jobs, refuse_if_running, show
from remesh.errors import ConfigError
from remesh.images.kinds import OpenFilePolicy
from remesh.rounds.job_folder import Checkpoint, JobFolder, JobSpec
from remesh.torch_programs.stay import KIND, TorchSettings, run_stay


@click.group()
def torch() -> None:
    """Checkpoint unmodified torch.distributed programs; restart them on other ports and interfaces."""


def _how(command: Any) -> Any:
    """Options that say how a job runs."""
    for option in reversed(
        [
            click.option("--interface", default="", help="Network interface for gloo, as in GLOO_SOCKET_IFNAME."),
            click.option("--every", "every_s", type=click.FloatRange(0.1), help="Seconds between checkpoints."),
            click.option("--keep", type=click.IntRange(1), default=2, show_default=True, help="Checkpoints to keep."),
            click.option("--incremental", is_flag=True, help="Write only memory changed since the last checkpoint."),
            click.option("--compress", is_flag=True, help="Compress the process images."),
            click.option("--round-limit", "round_limit_s", type=click.FloatRange(0.1), default=60.0, show_default=True,
                         help="Seconds after which a checkpoint that finds no consistent state is given up for now."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


@torch.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nproc-per-node", "--nproc_per_node", "num_ranks", type=click.IntRange(1), default=1,
              show_default=True, help="Number of ranks, as torchrun has it.")  # fmt: skip
@click.option(
    "--standalone", is_flag=True, help="Taken as torchrun takes it; a job runs on this host alone with and without it."
)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option(
    "--job",
    "job_path",
    type=click.Path(path_type=Path),
    help="Folder of the job; by default a new one in ./remesh-jobs or in $REMESH_JOBS.",
)
@_how
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_job(
    num_ranks: int, standalone: bool, is_module: bool, job_path: Path | None, script: str, arguments: tuple[str, ...],
    **how: Any,
) -> None:  # fmt: skip
    """Start SCRIPT on --nproc-per-node ranks of this host, as torchrun does; SIGTERM takes a checkpoint and stops."""
    if script.startswith("-"):
        raise ConfigError(f"starting a program: no such option {script}; see `remesh torch run --help`")
    if not is_module and not Path(script).is_file():
        raise ConfigError(
            f"starting {script}: no such file in {os.getcwd()}; name a Python script, or a module with -m"
        )
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise ConfigError(
            "starting a program with TORCH_DISTRIBUTED_DEBUG=DETAIL: its groups of groups are not carried; unset it"
        )
    name = script.replace(".", "-") if is_module else Path(script).stem
    path = job_path or jobs_root() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    argv = (*(("-m",) if is_module else ()), script, *arguments)
    spec = JobSpec(argv, num_ranks, os.getcwd(), dict(os.environ), kind=KIND)
    settings = TorchSettings(**how)
    folder = JobFolder.create(path.absolute(), spec)
    click.echo(f"remesh: job {folder.path}", err=True)
    _stay(folder, settings, None)


@torch.command("restart", short_help="Continue a job from a checkpoint.")
@click.argument("job")
@click.option("--checkpoint", "number", type=int, help="Number of the checkpoint; the newest one if left out.")
@click.option(
    "--open-files",
    type=click.Choice([policy.value for policy in OpenFilePolicy]),
    default=OpenFilePolicy.TRUNCATE.value,
    show_default=True,
    help="What to do with files open for writing that have changed since the checkpoint: truncate them to their length "
    "at the checkpoint, keep what was appended, refuse the restart, or leave them (rewrite) to a program that writes "
    "them again without reading them.",
)
@_how
def restart_job(job: str, number: int | None, open_files: str, **how: Any) -> None:
    """Continue JOB from a checkpoint on this host, on other ports and perhaps another interface."""
    folder = JobFolder.find(job, jobs_root())
    folder.refuse_other_kind(KIND)
    checkpoint = folder.checkpoint(number)
    settings = TorchSettings(open_files=OpenFilePolicy(open_files), **how)
    refuse_if_running(folder)
    _stay(folder, settings, checkpoint)


def _stay(folder: JobFolder, settings: TorchSettings, checkpoint: Checkpoint | None) -> None:
    outcome = run_stay(folder, settings, checkpoint, lambda line: click.echo(f"remesh: {line}", err=True))
    click.echo(f"remesh: {outcome.state}: {outcome.cause}", err=True)
    sys.exit(outcome.exit_code)


for _verb in (checkpoint_job, list_jobs, show):
    torch.add_command(_verb)
