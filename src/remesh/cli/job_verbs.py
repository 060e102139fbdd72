"""Verbs common to all kinds of jobs: lead one, take a checkpoint, list them, show one."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from remesh.carried.rounds.job_folder import Checkpoint, JobFolder
from remesh.carried.rounds.leader import JobOutcome
from remesh.carried.rounds.returns import run_with_restarts
from remesh.cli.shown import JSON, print_json, print_table, say, say_text, waiting
from remesh.foundation.errors import ConfigError, Error, PeerError
from remesh.foundation.settings import JOBS
from remesh.wire.messages import Line

_MIB = 1 << 20


def jobs_root() -> Path:
    """The folder in which jobs are created and looked up by name."""
    return Path(JOBS.read())


def lead_job(
    run_job_once: Callable[[Checkpoint | None], JobOutcome],
    folder: JobFolder,
    checkpoint: Checkpoint | None,
    max_restarts: int,
) -> NoReturn:
    """Lead a job, show what is logged of it, and end with its exit code."""
    logging.getLogger("remesh.carried").addHandler(_Echo())
    outcome = run_with_restarts(run_job_once, folder, checkpoint, max_restarts)
    say(f"remesh: {outcome.state}: {outcome.cause}", err=True)
    sys.exit(outcome.exit_code)


class _Echo(logging.Handler):
    """Lines of a log on the console."""

    def emit(self, record: logging.LogRecord) -> None:
        say_text(f"remesh: {self.format(record)}", err=True)


@click.command("checkpoint", short_help="Take a checkpoint of a running job.")
@click.argument("job")
@click.option("--stop", is_flag=True, help="End the job after the checkpoint.")
def checkpoint_job(job: str, stop: bool) -> None:
    """Take a checkpoint of the running JOB, from any shell. JOB is a folder, or its name as ls shows it."""
    folder = JobFolder.find(job, jobs_root())
    line = _call(folder)
    line.send({"type": "checkpoint", "stop": stop})
    with waiting(f"waiting until job {folder.name} has written its checkpoint"):
        answer = line.receive()
    if answer is None:
        raise PeerError(f"taking a checkpoint of {folder.name}: the job ended first; see {folder.logs / 'events.log'}")
    if "number" not in answer:
        raise PeerError(f"taking a checkpoint of {folder.name}: {answer['ending']}: {answer['reason']}")
    seconds = answer["seconds"]
    say(
        f"checkpoint {answer['number']}: {answer['num_bytes'] / _MIB:.1f} MiB in {seconds['total']:.3f} s "
        f"(cut after {seconds['cut']:.3f} s); {answer['ending']}"
        + (f"; attempt {answer['attempts']}" if answer["attempts"] > 1 else "")
    )
    say("caught: " + ", ".join(f"{count} {what}" for what, count in answer["caught"].items()))
    # Not always in the folder that was named: a folder that was copied while its job ran leads to the same job.
    say(f"in {answer['folder']}")


@click.command("ls", short_help="List the jobs here, with their state.")
@click.argument("root", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@JSON
def list_jobs(root: Path | None, as_json: bool) -> None:
    """List the jobs in the folder ROOT, or the job ROOT; by default those in ./remesh-jobs or in $REMESH_JOBS."""
    root = root or jobs_root()
    folders = [root, *root.iterdir()] if root.is_dir() else []
    jobs = sorted(path for path in folders if (path / "job.json").is_file())
    rows = [_describe_job(JobFolder(path)) for path in jobs]
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(f"remesh: no job in {root}; name the folder that holds them, or that --job has named", err=True)
        return
    print_table(("job", "state", "ranks", "checkpoints", "cause"), map(_row_of, rows))


def _row_of(job: dict[str, Any]) -> tuple[str, ...]:
    numbers = [f"{one['number']}{' (damaged)' if one['problem'] else ''}" for one in job["checkpoints"]]
    ranks = "" if job["num_ranks"] is None else str(job["num_ranks"])
    return job["job"], job["state"], ranks, ", ".join(numbers) or "none", job["cause"]


def _describe_job(folder: JobFolder) -> dict[str, Any]:
    """What `ls` shows of a job; one that is damaged hides no other."""
    checkpoints = [{"number": each.number, "problem": each.problem} for each in folder.checkpoints()]
    try:
        state, num_ranks = folder.find_state(), folder.read_spec().num_ranks
        row = {"state": state.state, "num_ranks": num_ranks, "cause": state.cause}
    except Error as error:
        row = {"state": "damaged", "num_ranks": None, "cause": str(error)}
    return {"job": folder.path.name, **row, "checkpoints": checkpoints}


@click.command("show", short_help="Print a job, a checkpoint or an image as JSON.")
@click.argument("what")
@click.option("--json", is_flag=True, expose_value=False, help="Print one JSON document, as this verb always does.")
def show(what: str) -> None:
    """Print WHAT as JSON: a job, or the folder of a checkpoint or of a process image."""
    path = Path(what)
    if not (path / "job.json").is_file() and path.is_dir():
        print_json(_describe_path(path))
        return
    folder = JobFolder.find(what, jobs_root())
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


def _describe_path(path: Path) -> Any:
    from remesh.carried.images import describe_image  # noqa: PLC0415  reads images; others need it not

    if (path / "manifest.json").is_file():
        return json.loads((path / "manifest.json").read_text())
    if not (path / "image.json").is_file():
        raise ConfigError(
            f"showing {path}: found neither job.json, manifest.json nor image.json in it, expected the folder of a "
            "job, of a checkpoint or of a process image; the verb `ls` lists the jobs"
        )
    return describe_image(path)


def _call(folder: JobFolder) -> Line:
    state = folder.find_state()
    if not state.addresses:
        can_go_on = any(not each.problem for each in folder.checkpoints())
        how = (
            f"continue it with `remesh {folder.read_spec().kind} restart`"
            if can_go_on
            else "it has no checkpoint to continue from"
        )
        if state.state == "finished":
            how = "it has nothing left to save"
        raise ConfigError(f"calling job {folder.name}: it is {state.state} ({state.cause}), expected it to run; {how}")
    return Line.connect(list(state.addresses), folder.read_token(), f"calling job {folder.name}")


def refuse_if_running(folder: JobFolder) -> None:
    """Raise an error that names the leader of a job, if one answers for it."""
    if not folder.find_state().addresses:
        return
    try:
        line = _call(folder)
    except PeerError:
        return
    line.close()
    raise folder.led_by_another()
