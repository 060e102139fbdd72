"""``remesh mpi``: checkpoints of unmodified MPI programs, and restarts under any MPI on any network."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from remesh.carried.hosts.host_list import parse_hosts
from remesh.carried.hosts.job_hosts import make_testbed
from remesh.carried.hosts.slurm import BatchLaunch, make_script
from remesh.carried.images.form.kinds import OpenFilePolicy
from remesh.carried.mpi.extension import find_missing
from remesh.carried.mpi.input_file import find_input
from remesh.carried.mpi.library.program_faces import check_program, find_missing_library
from remesh.carried.mpi.mpi_job import Placement, RunSettings, find_launch, run_job_once
from remesh.carried.mpi.mpis import Installation, find_all
from remesh.carried.rounds.job_folder import Checkpoint, JobFolder, JobSpec
from remesh.cli.job_options import CHECKPOINTS, HOSTS, JOB, MAX_RESTARTS, RESTART, with_options
from remesh.cli.job_verbs import checkpoint_job, jobs_root, lead_job, list_jobs, refuse_if_running, show
from remesh.cli.shown import JSON, print_document, print_json, say, waiting, width_of_terminal
from remesh.foundation.errors import ConfigError
from remesh.foundation.exit_codes import ExitCode


@click.group()
def mpi() -> None:
    """Checkpoint unmodified MPI programs in C, C++, Fortran and Python; restart them under another MPI and network."""


_MPI = click.option(
    "--mpi", "mpi_name", default="openmpi", show_default=True, help="MPI library: openmpi, mpich, impi or system."
)
_NETWORK = click.option("--network", help="Network: shm, tcp, ucx or ofi; by default that of the MPI library.")
_how = with_options(_MPI, _NETWORK, *HOSTS, *CHECKPOINTS, MAX_RESTARTS)


@mpi.command(
    "run",
    short_help="Start a program on -n ranks.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-n", "num_ranks", type=click.IntRange(1), required=True, help="Number of ranks.")
@JOB
@_how
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_job(
    num_ranks: int, job_path: Path | None, program: str, arguments: tuple[str, ...], hosts: str | None,
    max_restarts: int, **how: Any,
) -> None:  # fmt: skip
    """Start PROGRAM on -n ranks: ./a.out in any language, or app.py, which this Python runs with its own mpi4py.

    Standard input from a file (< FILE) goes to rank 0; the others, and input from a pipe or a terminal, read nothing.
    """
    path = job_path or jobs_root() / f"{Path(program).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    argv = (*((sys.executable,) if program.endswith(".py") else ()), program, *arguments)
    placement, settings = _read_how(hosts, num_ranks, **how)
    _refuse_missing(program)
    spec = JobSpec(argv, num_ranks, os.getcwd(), dict(os.environ), *find_input())
    folder = JobFolder.create(path.absolute(), spec)
    say(f"remesh: job {folder.path}", err=True)
    _lead(folder, placement, settings, None, max_restarts)


@mpi.command("restart", short_help="Continue a job from a checkpoint.")
@click.argument("job")
@with_options(*RESTART)
@_how
def restart_job(
    job: str, number: int | None, hosts: str | None, open_files: str, max_restarts: int, **how: Any
) -> None:
    """Continue JOB from a checkpoint, under the given MPI library and on the given hosts."""
    folder = JobFolder.find(job, jobs_root())
    folder.refuse_other_kind("mpi")
    checkpoint = folder.checkpoint(number)
    policy = OpenFilePolicy(open_files)
    placement, settings = _read_how(hosts, folder.read_spec().num_ranks, open_files=policy, **how)
    refuse_if_running(folder)
    _lead(folder, placement, settings, checkpoint, max_restarts)


def _read_how(
    hosts: str | None,
    num_ranks: int,
    *,
    mpi_name: str,
    network: str | None,
    testbed: str | None,
    **settings: Any,
) -> tuple[Placement, RunSettings]:
    missing = find_missing()
    if missing is not None:
        raise ConfigError(missing)
    placed = () if hosts is None else parse_hosts(hosts, num_ranks)
    placement = Placement(mpi_name, network, placed, testbed)
    find_launch(placement)
    if testbed is not None:
        make_testbed(placed, testbed)
    return placement, RunSettings(**settings)


def _refuse_missing(program: str) -> None:
    """A script is a file, anything else is found as a shell finds it, and can have its MPI replaced."""
    found = program if program.endswith(".py") and Path(program).is_file() else shutil.which(program)
    if found is None:
        where = "" if program.endswith(".py") or "/" in program else " or on the PATH"
        raise ConfigError(
            f"starting {program}: no such program in {os.getcwd()}{where}; name one that is on every host"
        )
    check_program(Path(found))


def _lead(
    folder: JobFolder, placement: Placement, settings: RunSettings, checkpoint: Checkpoint | None, max_restarts: int
) -> None:
    lead_job(lambda begin: run_job_once(folder, placement, settings, begin).outcome, folder, checkpoint, max_restarts)


for _verb in (checkpoint_job, list_jobs, show):
    mpi.add_command(_verb)


@mpi.command("doctor", short_help="Check whether this machine can run jobs.")
@JSON
def examine(as_json: bool) -> None:
    """Check what this machine has and lacks for checkpoints of MPI programs, and print what to do.

    Exit code 1 if something required is missing.
    """
    with waiting("trying an image of a process"):
        findings = [*_examine_machine(), *_built(), *_mpis()]
    if as_json:
        print_json(findings)
    else:
        for one in findings:
            say(f"{_mark(good=one['good'], needed=one['needed']):6} {one['what']}: {one['found']}")
            say(*textwrap.wrap(one["advice"], width_of_terminal() - 7, break_long_words=False), indent=7)
    if lacking := [one["what"] for one in findings if one["needed"] and not one["good"]]:
        say(f"MPI programs cannot be checkpointed here: see {', '.join(lacking)}", err=True)
        sys.exit(ExitCode.FAILED)
    if not as_json:
        say("OK: MPI programs can be checkpointed here")


def _examine_machine() -> list[dict[str, Any]]:
    from remesh.carried.images import examine_machine  # noqa: PLC0415  as above

    return [asdict(finding) for finding in examine_machine()]


def _built() -> Iterator[dict[str, Any]]:
    """Findings about the parts in C that are built when Remesh is installed."""
    for what, missing in (("C extension", find_missing()), ("library for programs", find_missing_library())):
        found = "missing" if missing else "built"
        yield {"what": what, "good": not missing, "needed": True, "found": found, "advice": missing or ""}


def _mpis() -> Iterator[dict[str, Any]]:
    """One is needed; where there is one, the others are not."""
    installed = find_all()
    has_mpi = any(isinstance(found, Installation) for _, found in installed)
    for name, found in installed:
        if isinstance(found, Installation):
            row = {"good": True, "needed": True, "found": found.launcher, "advice": ""}
        else:
            advice = "not needed, another MPI is here" if has_mpi else str(found)
            row = {"good": False, "needed": not has_mpi, "found": "missing", "advice": advice}
        yield {"what": f"MPI {name}", **row}


def _mark(*, good: bool, needed: bool) -> str:
    return "ok" if good else "LACKS" if needed else "-"


@mpi.command("slurm", short_help="Print a batch script for Slurm.", context_settings={"allow_interspersed_args": False})
@click.option("-n", "num_ranks", type=click.IntRange(1), required=True, help="Number of ranks.")
@_MPI
@click.option("--job", "job_path", required=True, help="Folder of the job, on a shared file system.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def slurm_script(num_ranks: int, mpi_name: str, job_path: str, program: str, arguments: tuple[str, ...]) -> None:
    """Print a batch script for Slurm that starts PROGRAM, or continues it from its newest checkpoint."""
    launch = BatchLaunch("mpi", ("-n", str(num_ranks)), ("--mpi", mpi_name))
    print_document(make_script(num_ranks, launch, job_path, (program, *arguments)))
