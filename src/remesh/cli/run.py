"""``remesh run``: this node's agent. It takes torchrun's command lines as they are; see docs/elastic."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from torch.distributed.elastic.multiprocessing import SignalException

from remesh.elasticity import node
from remesh.elasticity.launch.flag_checks import wait_for_names
from remesh.elasticity.launch.flags import FLAGS, LIST, REAL, SWITCH, TORCHRUN_FLAGS, WHOLE, Flag, Mode, complete_name
from remesh.elasticity.launch.request import (
    Request,
    check_request,
    describe_uncovered,
    endpoints_of,
    in_process_job,
    restart_job,
)
from remesh.elasticity.launch.restart import run_restart_job
from remesh.elasticity.launch.verdict import outcome_of_error
from remesh.elasticity.model.outcome import Outcome, describe_signal
from remesh.elasticity.own_folder import own_folder
from remesh.elasticity.telemetry.events import EventLog
from remesh.elasticity.telemetry.metrics import Metrics
from remesh.elasticity.telemetry.metrics_server import MetricsServer
from remesh.foundation.exit_codes import ExitCode, of_signal
from remesh.foundation.settings import timeout_s

NAME_TIMEOUT_S = timeout_s(60.0)
"""How long the host of the meeting may be unknown to this machine's resolver."""
_TYPES = {WHOLE: click.INT, REAL: click.FLOAT}


@click.pass_context
def _run(context: click.Context, /, script: str, arguments: tuple[str, ...], **values: Any) -> None:
    """Start SCRIPT on this node as part of a job of one node or many. It takes torchrun's flags.

    The script calls remesh.elastic(train, mesh=...): when a worker or a node dies, the others keep their processes,
    form a new mesh and go on. Any other script wants --mode restart, and runs as under torchrun: all workers are
    started anew.

    Exit codes: 0 ended well, 1 a worker failed, 2 wrong input, 70 a defect of remesh, 75 infrastructure, 80 left on
    request, 81 left on request without its state.
    """
    given = frozenset(name for name in values if context.get_parameter_source(name) is not ParameterSource.DEFAULT)
    request = Request(values, given, script, arguments)
    if "LOGLEVEL" not in os.environ:
        # The agent prints what happened; torch would print it several times. Its launcher's logger has a level too.
        for name in ("torch.distributed", "torch.distributed.run"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        outcome = run_request(request)
    except SignalException as error:
        _end_by_signal(request, SystemExit(of_signal(error.sigval)))
    except SystemExit as ended:
        _end_by_signal(request, ended)
    except Exception as error:
        outcome = outcome_of_error(error)
    if outcome.exit_code != ExitCode.OK:
        click.echo(outcome.describe(request.node_name), err=True)
    sys.exit(outcome.exit_code)


def _end_by_signal(request: Request, ended: SystemExit) -> NoReturn:
    click.echo(f"remesh: the agent of {request.node_name} was {describe_signal(ended)}, its workers with it", err=True)
    raise ended


def run_request(request: Request) -> Outcome:
    """Run this node's agent to its end; raises what kept it from starting or running."""
    check_request(request)
    metrics = Metrics()
    with contextlib.ExitStack() as stack:
        if request.values["metrics_port"] is not None:
            server = stack.enter_context(MetricsServer(request.values["metrics_port"], metrics.render))
            click.echo(f"remesh: metrics at http://127.0.0.1:{server.port}/metrics", err=True)
        if request.mode is Mode.IN_PROCESS:
            values = dict(request.values)
            for flag in FLAGS:
                if flag.in_process_default is not None and flag.dest not in request.given:
                    values[flag.dest] = flag.in_process_default
            request = Request(values, request.given, request.script, request.arguments)
            job = in_process_job(request)
            _wait_for_names(request)
            if uncovered := describe_uncovered(job, os.environ):
                click.echo(f"remesh: {uncovered}", err=True)
            return node.run_agent(job, metrics.take)
        spare_folder = stack.enter_context(own_folder())
        if "LOGLEVEL" not in os.environ:
            # torch itself prints which worker failed, and how.
            logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.ERROR)
        restarted = restart_job(request, spare_folder)
        _wait_for_names(request)
        log = EventLog(request.events_folder, f"agent-{request.node_name}", metrics.take)
        stack.callback(log.close)
        log.write("agent", pid=os.getpid(), node=request.node_name, mode=request.mode.value)
        try:
            outcome = run_restart_job(restarted, log, _print).outcome
        except SignalException as error:
            log.write("finish", ok=False, category=None, text=f"ended by {signal.Signals(error.sigval).name}")
            raise
        except Exception as error:
            outcome = outcome_of_error(error)
        category = outcome.category.value if outcome.category else None
        log.write("finish", ok=category is None, category=category, text=outcome.text)
        return outcome


def _wait_for_names(request: Request) -> None:
    wait_for_names(endpoints_of(request), NAME_TIMEOUT_S, _print)


def _print(text: str) -> None:
    click.echo(f"remesh: {text}", err=True)


class _CommaList(click.ParamType[tuple[str, ...]]):
    """``a,b`` as ("a", "b"); ``,,`` stands for a comma."""

    name = "list"

    def convert(self, value: Any, _param: click.Parameter | None, _ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple | list):
            return tuple(value)
        return tuple(item.replace("\0", ",") for item in str(value).replace(",,", "\0").split(","))


def _option_of(flag: Flag) -> click.Option:
    names = [flag.dest, *([f"-{flag.short}"] if flag.short else []), f"--{flag.name}"]
    if flag.dest == "rdzv_host":
        names = [flag.dest, "--rdzv-host/--no-rdzv-host"]
    kind: Any = _TYPES.get(flag.kind)
    if flag.choices:
        kind = click.Choice(flag.choices)
    elif flag.kind == LIST:
        kind = _CommaList()
    from_environment = flag in TORCHRUN_FLAGS and flag.from_environment
    return click.Option(
        names,
        default=flag.default,
        type=kind,
        is_flag=flag.kind == SWITCH,
        help=flag.help,
        show_default=flag.default not in (None, "", (), False),
        envvar=f"PET_{flag.dest.upper()}" if from_environment else None,
    )


def _parameters() -> Sequence[click.Parameter]:
    rest = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    return [*map(_option_of, FLAGS), click.Argument(["script"]), rest]


run = click.Command(
    "run",
    callback=_run,
    params=list(_parameters()),
    help=_run.__doc__,
    context_settings={"allow_interspersed_args": False, "token_normalize_func": complete_name},
)
