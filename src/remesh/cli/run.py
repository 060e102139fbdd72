"""``remesh run``: this node's agent, with torchrun's flags where they mean the same."""

from __future__ import annotations

import socket
import sys
import uuid
from pathlib import Path

import click
from torch.distributed.elastic.multiprocessing import Std

from remesh.elastic.agent import Agent, AgentConfig
from remesh.elastic.generation import MeetingRules
from remesh.elastic.membership import AgentRules
from remesh.errors import ConfigError

DEFAULT_PORT = 29400
"""torchrun's default rendezvous port."""
EXIT_TIMEOUT_S = 30.0
"""How long workers may take to end, as torchrun gives them before it kills."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nnodes", default="1", show_default=True, help="Nodes of the job: N, or MIN:MAX for an elastic job.")
@click.option("--nproc-per-node", type=click.IntRange(1), default=1, show_default=True, help="Workers on this node.")
@click.option(
    "--rdzv-endpoint", default="", help="HOST[:PORT] where the nodes meet; the node it names hosts the store."
)
@click.option("--rdzv-id", default="", help="Name of the job, equal on all its nodes. Needed with --rdzv-endpoint.")
@click.option(
    "--rdzv-host/--no-rdzv-host", default=None, help="Host the store here, or not; default: as the endpoint says."
)
@click.option("--node-name", default="", help="Name of this node in logs and reports (default: host name).")
@click.option(
    "--local-addr", default="127.0.0.1", show_default=True, help="Address on which other agents reach this one."
)
@click.option(
    "--max-restarts", type=click.IntRange(0), default=3, show_default=True, help="Killed workers to replace here."
)
@click.option(
    "--last-call", type=float, default=5.0, show_default=True, help="Seconds to wait for more than MIN nodes."
)
@click.option("--join-timeout", type=float, default=600.0, show_default=True, help="Seconds to wait for enough nodes.")
@click.option(
    "--leave-timeout", type=float, default=30.0, show_default=True, help="Seconds until a stuck worker is killed."
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="Folder for the workers' output.")
@click.option("--redirects", default="0", show_default=True, help="Streams to send to files: 0, 1 (out), 2 (err), 3.")
@click.option("--tee", default="0", show_default=True, help="Streams to send to files and the console.")
@click.option("--events-dir", type=click.Path(path_type=Path), help="Folder for the event logs (JSON lines).")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    nnodes: str,
    nproc_per_node: int,
    rdzv_endpoint: str,
    rdzv_id: str,
    rdzv_host: bool | None,
    node_name: str,
    local_addr: str,
    max_restarts: int,
    last_call: float,
    join_timeout: float,
    leave_timeout: float,
    log_dir: Path | None,
    redirects: str,
    tee: str,
    events_dir: Path | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start SCRIPT on this node as part of an elastic job.

    The script calls remesh.elastic(train, mesh=...). When a worker or a node dies, the others keep their processes,
    form a new mesh and go on; a node started later joins at the next step. Without --rdzv-endpoint the job has this
    node alone.
    """
    min_nodes, max_nodes = parse_nnodes(nnodes)
    if not module and not Path(script).is_file():
        raise ConfigError(
            f"starting workers: script {script!r} does not exist; give a path to a Python file, or -m MODULE"
        )
    if rdzv_endpoint and not rdzv_id:
        raise ConfigError(
            "meeting other nodes: --rdzv-endpoint needs --rdzv-id, the name that all nodes of the job give"
        )
    meeting = MeetingRules(min_nodes, max_nodes, last_call, join_timeout, absence_timeout_s=2 * leave_timeout)
    config = AgentConfig(
        command=(sys.executable, "-u", *(("-m",) if module else ()), script, *arguments),
        rules=AgentRules(nproc_per_node, max_restarts, meeting, leave_timeout, EXIT_TIMEOUT_S),
        run_id=rdzv_id or uuid.uuid4().hex,
        endpoint=complete_endpoint(rdzv_endpoint),
        hosts_store=rdzv_host if rdzv_endpoint else True,
        node_name=node_name or socket.gethostname(),
        local_address=local_addr,
        log_folder=log_dir,
        redirects=_streams(redirects),
        tee=_streams(tee),
        events_folder=events_dir.absolute() if events_dir else None,
    )
    sys.exit(Agent(config).run())


def parse_nnodes(text: str) -> tuple[int, int]:
    """``"2"`` or ``"1:4"`` as (fewest, most) nodes."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise ConfigError(f"reading --nnodes {text!r}: expected N or MIN:MAX with 1 <= MIN <= MAX, as in 1:4")
    return int(low), int(high or low)


def complete_endpoint(endpoint: str) -> str:
    """The endpoint with its port; a free port of loopback when there is none at all."""
    if endpoint:
        return endpoint if ":" in endpoint else f"{endpoint}:{DEFAULT_PORT}"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _streams(text: str) -> Std:
    value = Std.from_str(text)
    if not isinstance(value, Std):
        raise ConfigError(f"reading stream choice {text!r}: expected 0, 1, 2 or 3 for all workers")
    return value
