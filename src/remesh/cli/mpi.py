"""``remesh mpi``: checkpoints of MPI programs that know nothing of them, and restarts under any MPI on any network."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from remesh.cli.shown import JSON, print_json
from remesh.comm.messages import Line
from remesh.errors import ConfigError, Error, PeerError
from remesh.exit_codes import ExitCode
from remesh.images.kinds import OpenFilePolicy
from remesh.mpi.extension import find_missing
from remesh.mpi.input_file import find_input
from remesh.mpi.library.faces import check_program, find_missing_library
from remesh.mpi.mpis import Installation, find_all
from remesh.mpi.slurm import make_script
from remesh.mpi.stay import Placement, StaySettings, find_launch, make_bed, parse_hosts, run_stay
from remesh.rounds.job_folder import JobFolder, JobSpec

_ROOT = "remesh-jobs"
_MIB = 1 << 20


@click.group()
def mpi() -> None:
    """Checkpoint unmodified MPI programs in C, C++, Fortran and Python; restart them under another MPI and network."""


def _jobs_root() -> Path:
    return Path(os.environ.get("REMESH_JOBS", _ROOT))


def _where(command: Any) -> Any:
    """Options that say where and how a job runs."""
    for option in reversed(
        [
            click.option("--mpi", "mpi_name", default="openmpi", show_default=True,
                         help="MPI library: openmpi, mpich, impi or system."),
            click.option("--network", help="Network: shm, tcp, ucx or ofi; by default that of the MPI library."),
            click.option("--hosts", help="Hosts as NAME or NAME:RANKS, separated by commas; this host if left out."),
            click.option("--testbed", metavar="RATE", help="Make the hosts on this machine, with links of this rate."),
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


@mpi.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "num_ranks", type=click.IntRange(1), required=True, help="Number of ranks.")
@click.option(
    "--job",
    "job_path",
    type=click.Path(path_type=Path),
    help="Folder of the job, on a shared file system; by default a new one in ./remesh-jobs or in $REMESH_JOBS.",
)
@_where
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_job(
    num_ranks: int, job_path: Path | None, program: str, arguments: tuple[str, ...], hosts: str | None, **how: Any
) -> None:
    """Start PROGRAM on -n ranks: ./a.out in any language, or app.py, which this Python runs with its own mpi4py.

    Standard input from a file (< FILE) goes to rank 0; the others, and input from a pipe or a terminal, read nothing.
    """
    path = job_path or _jobs_root() / f"{Path(program).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    argv = (*((sys.executable,) if program.endswith(".py") else ()), program, *arguments)
    placement, settings = _read_how(hosts, num_ranks, **how)
    _refuse_missing(program)
    spec = JobSpec(argv, num_ranks, os.getcwd(), dict(os.environ), *find_input())
    folder = JobFolder.create(path.absolute(), spec)
    click.echo(f"remesh: job {folder.path}", err=True)
    _stay(folder, placement, settings, None)


@mpi.command("restart", short_help="Continue a job from a checkpoint.")
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
@_where
def restart_job(job: str, number: int | None, hosts: str | None, open_files: str, **how: Any) -> None:
    """Continue JOB from a checkpoint, under the given MPI library and on the given hosts."""
    folder = JobFolder.find(job, _jobs_root())
    checkpoint = folder.checkpoint(number)
    policy = OpenFilePolicy(open_files)
    placement, settings = _read_how(hosts, folder.read_spec().num_ranks, open_files=policy, **how)
    _refuse_if_running(folder)
    _stay(folder, placement, settings, checkpoint)


def _read_how(
    hosts: str | None,
    num_ranks: int,
    *,
    mpi_name: str,
    network: str | None,
    testbed: str | None,
    **settings: Any,
) -> tuple[Placement, StaySettings]:
    missing = find_missing()
    if missing is not None:
        raise ConfigError(missing)
    placed = () if hosts is None else parse_hosts(hosts, num_ranks)
    placement = Placement(mpi_name, network, placed, testbed)
    find_launch(placement)
    if testbed is not None:
        make_bed(placement)
    return placement, StaySettings(**settings)


def _refuse_missing(program: str) -> None:
    """A script is a file, anything else is found as a shell finds it, and can have its MPI replaced."""
    found = program if program.endswith(".py") and Path(program).is_file() else shutil.which(program)
    if found is None:
        where = "" if program.endswith(".py") or "/" in program else " or on the PATH"
        raise ConfigError(
            f"starting {program}: no such program in {os.getcwd()}{where}; name one that is on every host"
        )
    check_program(Path(found))


def _stay(folder: JobFolder, placement: Placement, settings: StaySettings, checkpoint: Any) -> None:
    stay = run_stay(folder, placement, settings, checkpoint, lambda line: click.echo(f"remesh: {line}", err=True))
    click.echo(f"remesh: {stay.outcome.state}: {stay.outcome.cause}", err=True)
    sys.exit(stay.outcome.exit_code)


@mpi.command("checkpoint", short_help="Take a checkpoint of a running job.")
@click.argument("job")
@click.option("--stop", is_flag=True, help="End the job after the checkpoint.")
def checkpoint_job(job: str, stop: bool) -> None:
    """Take a checkpoint of the running JOB, from any shell. JOB is a folder, or its name as ls shows it."""
    folder = JobFolder.find(job, _jobs_root())
    line = _call(folder)
    line.send({"type": "checkpoint", "stop": stop})
    answer = line.receive()
    if answer is None:
        raise PeerError(f"taking a checkpoint of {folder.name}: the job ended first; see {folder.logs / 'events.log'}")
    if "number" not in answer:
        raise PeerError(f"taking a checkpoint of {folder.name}: {answer['ending']}: {answer['reason']}")
    seconds = answer["seconds"]
    click.echo(
        f"checkpoint {answer['number']}: {answer['num_bytes'] / _MIB:.1f} MiB in {seconds['total']:.3f} s "
        f"(cut after {seconds['cut']:.3f} s); {answer['ending']}"
        + (f"; attempt {answer['attempts']}" if answer["attempts"] > 1 else "")
    )
    click.echo("caught: " + ", ".join(f"{count} {what}" for what, count in answer["caught"].items()))
    # Not always in the folder that was named: one that was copied while its job ran speaks to the same job.
    click.echo(f"in {answer['folder']}")


@mpi.command("ls", short_help="List the jobs here, with their state.")
@JSON
def list_jobs(as_json: bool) -> None:
    """List the jobs in ./remesh-jobs, or in REMESH_JOBS if that is set, with their state."""
    root = _jobs_root()
    jobs = sorted(path for path in root.iterdir() if (path / "job.json").is_file()) if root.is_dir() else []
    rows = [_describe_job(JobFolder(path)) for path in jobs]
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"remesh: no job in {root}; name another folder in REMESH_JOBS", err=True)
        return
    table = Table("job", "state", "ranks", "checkpoints", "cause")
    for row in rows:
        numbers = [f"{one['number']}{' (damaged)' if one['problem'] else ''}" for one in row["checkpoints"]]
        ranks = "" if row["num_ranks"] is None else str(row["num_ranks"])
        table.add_row(row["job"], row["state"], ranks, ", ".join(numbers) or "none", row["cause"])
    Console(file=sys.stdout).print(table)


def _describe_job(folder: JobFolder) -> dict[str, Any]:
    """What `ls` shows of a job; one that is damaged hides no other."""
    checkpoints = [{"number": each.number, "problem": each.problem} for each in folder.checkpoints()]
    try:
        state, num_ranks = folder.find_state(), folder.read_spec().num_ranks
        told = {"state": state.state, "num_ranks": num_ranks, "cause": state.cause}
    except Error as error:
        told = {"state": "damaged", "num_ranks": None, "cause": str(error)}
    return {"job": folder.path.name, **told, "checkpoints": checkpoints}


@mpi.command("show", short_help="Print a job, a checkpoint or an image as JSON.")
@click.argument("what")
def show(what: str) -> None:
    """Print WHAT as JSON: a job, or the folder of a checkpoint or of a process image."""
    path = Path(what)
    if not (path / "job.json").is_file() and path.is_dir():
        print_json(_describe_path(path))
        return
    folder = JobFolder.find(what, _jobs_root())
    state = folder.find_state()
    value: dict[str, Any] = {
        "job": str(folder.path),
        "argv": folder.read_spec().argv,
        "num_ranks": folder.read_spec().num_ranks,
        "state": state.state,
        "cause": state.cause,
        "launch": state.launch,
        "checkpoints": [
            {"number": each.number, "problem": each.problem} if each.problem else each.manifest
            for each in folder.checkpoints()
        ],
    }
    if state.addresses:
        try:
            line = _call(folder)
            line.send({"type": "look"})
            value["now"] = line.receive(10.0)
        except (Error, OSError) as error:
            value["now"] = f"no answer: {error}"
    print_json(value)


@mpi.command("doctor", short_help="Check whether this machine can run jobs.")
@JSON
def examine(as_json: bool) -> None:
    """Check what this machine has and lacks for checkpoints of MPI programs, and say what to do.

    Exit code 1 if something required is missing.
    """
    findings = [*_examine_machine(), *_built(), *_mpis()]
    if as_json:
        print_json(findings)
    else:
        table = Table("", "what", "found", "what to do")
        for one in findings:
            table.add_row(_mark(good=one["good"], needed=one["needed"]), one["what"], one["found"], one["advice"])
        Console(file=sys.stdout).print(table)
    if any(one["needed"] and not one["good"] for one in findings):
        sys.exit(ExitCode.FAILED)


def _examine_machine() -> list[dict[str, Any]]:
    from remesh.images import examine_machine  # noqa: PLC0415  as above

    return [asdict(finding) for finding in examine_machine()]


def _built() -> Iterator[dict[str, Any]]:
    """What is built of C when Remesh is installed."""
    for what, missing in (("C extension", find_missing()), ("library for programs", find_missing_library())):
        found = "missing" if missing else "built"
        yield {"what": what, "good": not missing, "needed": True, "found": found, "advice": missing or ""}


def _mpis() -> Iterator[dict[str, Any]]:
    """One is needed; where there is one, the others are not."""
    installed = find_all()
    has_mpi = any(isinstance(found, Installation) for _, found in installed)
    for name, found in installed:
        if isinstance(found, Installation):
            told = {"good": True, "needed": True, "found": found.launcher, "advice": ""}
        else:
            told = {"good": False, "needed": not has_mpi, "found": "missing", "advice": str(found)}
        yield {"what": f"MPI {name}", **told}


def _mark(*, good: bool, needed: bool) -> str:
    return "ok" if good else "LACKS" if needed else "-"


@mpi.command("slurm", short_help="Print a batch script for Slurm.")
@click.option("-n", "num_ranks", type=click.IntRange(1), required=True, help="Number of ranks.")
@click.option(
    "--mpi", "mpi_name", default="openmpi", show_default=True, help="MPI library: openmpi, mpich, impi or system."
)
@click.option("--job", "job_path", required=True, help="Folder of the job, on a shared file system.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def slurm_script(num_ranks: int, mpi_name: str, job_path: str, program: str, arguments: tuple[str, ...]) -> None:
    """Print a batch script for Slurm that starts PROGRAM, or continues it from its newest checkpoint."""
    click.echo(make_script(num_ranks, mpi_name, job_path, (program, *arguments)), nl=False)


def _describe_path(path: Path) -> Any:
    from remesh.images import describe_image  # noqa: PLC0415  reads images; others need it not

    if (path / "manifest.json").is_file():
        return json.loads((path / "manifest.json").read_text())
    return describe_image(path)


def _call(folder: JobFolder) -> Line:
    state = folder.find_state()
    if not state.addresses:
        can_go_on = any(not each.problem for each in folder.checkpoints())
        how = "go on with it by `remesh mpi restart`" if can_go_on else "it has no checkpoint to go on from"
        if state.state == "finished":
            how = "it has nothing left to save"
        raise ConfigError(f"calling job {folder.name}: it is {state.state} ({state.cause}), expected it to run; {how}")
    return Line.connect(list(state.addresses), folder.read_token(), f"calling job {folder.name}")


def _refuse_if_running(folder: JobFolder) -> None:
    if not folder.find_state().addresses:
        return
    try:
        line = _call(folder)
    except PeerError:
        return
    line.close()
    raise folder.led_by_another()
