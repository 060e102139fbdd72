"""Job request from ``remesh run``'s flags, checked, in the terms of one of the two modes.

Every mistake that can be seen before a worker starts is a ConfigError here: the caller must act, and nothing was made.
"""

from __future__ import annotations

import socket
import sys
import uuid
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.events import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser

from remesh.elasticity.launch.flag_checks import (
    check_conf,
    check_endpoints,
    check_numbers,
    check_script,
    check_signals,
    check_writable,
    split_endpoints,
    unquoted,
    with_port,
)
from remesh.elasticity.launch.flags import FLAGS, TORCHRUN_FLAGS, Mode, find_flag
from remesh.elasticity.launch.restart import RestartJob
from remesh.elasticity.membership.exclusion import ExclusionRules, StragglerRules
from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.model.generation import MeetingRules
from remesh.elasticity.node.config import AgentConfig
from remesh.elasticity.store.admission import read_token
from remesh.elasticity.store.card import JobCard
from remesh.elasticity.store.endpoint import is_loopback, join_endpoint
from remesh.foundation.errors import ConfigError
from remesh.wire.free_ports import free_port
from remesh.wire.tls import Tls
from remesh.wire.token import Token

DEFAULT_PORT = 29400
"""torchrun's default rendezvous port."""
DEFAULT_MASTER_PORT = 29500
_SOME_SCRIPT = "script.py"
"""For a parser that wants one."""
EXIT_TIMEOUT_S = 30.0
"""How long workers may take to end, as torchrun gives them before it kills."""
_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_CONF_KEYS = {"join_timeout", "last_call_timeout", "is_host"}
"""Keys of --rdzv-conf that in-process mode knows."""


@dataclass(frozen=True, slots=True)
class Request:
    """What ``remesh run`` was asked for."""

    values: Mapping[str, Any]
    """Every flag's value, by its name in Python."""
    given: frozenset[str]
    """Flags that were set on the command line or by the environment."""
    script: str
    arguments: tuple[str, ...]

    @property
    def mode(self) -> Mode:
        return Mode(self.values["mode"])

    @property
    def node_name(self) -> str:
        return self.values["node_name"] or socket.gethostname()

    @property
    def events_folder(self) -> Path | None:
        folder = self.values["events_dir"]
        return Path(folder).absolute() if folder else None


def check_request(request: Request) -> None:
    """Raise ConfigError for what can be seen to be wrong before anything starts."""
    values, mode = request.values, request.mode
    parse_nnodes(values["nnodes"])
    strange = sorted(dest for dest in request.given if mode.value not in find_flag(dest).modes)
    if strange:
        flags = ", ".join(f"--{find_flag(dest).name}" for dest in strange)
        raise ConfigError(
            f"reading the flags: {mode.value} mode has no {flags}"
            + (", since its agents and stores are torch's, which do not support TLS" if "tls" in flags else "")
            + "; leave them out, or choose the other mode with --mode"
        )
    check_numbers(values, FLAGS)
    num_workers(values["nproc_per_node"])
    check_signals(values["signals_to_handle"])
    check_script(request.script, values)
    if not values["standalone"]:
        check_endpoints(values["rdzv_endpoint"])
    check_conf(values["rdzv_conf"])
    if values["rdzv_backend"] == "static" and values["node_rank"] >= parse_nnodes(values["nnodes"])[1]:
        raise ConfigError(
            f"reading --node-rank {values['node_rank']}: expected less than --nnodes {values['nnodes']}, counted from 0"
        )
    for dest in ("log_dir", "events_dir"):
        if values[dest]:
            check_writable(Path(values[dest]), f"--{dest.replace('_', '-')}")


def endpoints_of(request: Request) -> list[str]:
    """The rendezvous endpoints; empty for a job of this node only."""
    values, given = request.values, request.given
    if values["standalone"]:
        return []
    return split_endpoints(values["rdzv_endpoint"] or (values["master_addr"] if "master_addr" in given else ""))


def token_of(request: Request) -> Token:
    """The secret of the job that is asked for."""
    return read_token(request.values["rdzv_id"], request.values["token_file"])


def restart_job(request: Request, spare_folder: Path) -> RestartJob:
    """The job in torch's terms. ``spare_folder`` takes error files where no --log-dir is given."""
    values = dict(request.values)
    names_a_place = values["rdzv_backend"] != "static" or values["rdzv_endpoint"] or values["master_port"] is not None
    is_alone = parse_nnodes(values["nnodes"])[1] == 1 and not names_a_place
    if values["standalone"] or is_alone:
        # As torchrun: a job of one node that names no port gets a free one.
        values |= {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "rdzv_id": uuid.uuid4().hex}
    values["rdzv_conf"] = unquoted(values["rdzv_conf"])
    values["log_dir"] = values["log_dir"] or str(spare_folder)
    values["master_port"] = values["master_port"] or DEFAULT_MASTER_PORT
    values["duplicate_stdout_filters"] = list(values["duplicate_stdout_filters"])
    values["duplicate_stderr_filters"] = list(values["duplicate_stderr_filters"])
    script = {"training_script": request.script, "training_script_args": list(request.arguments)}
    asked = Namespace(**{**_defaults_of_torchrun(request), **values, **script})
    if values["rdzv_backend"] not in (known := {*_BACKENDS, *entry_points(group="torchrun.handlers").names}):
        raise ConfigError(f"reading --rdzv-backend {values['rdzv_backend']!r}: expected one of {sorted(known)}")
    try:
        get_logging_handler(values["event_log_handler"])
    except KeyError as error:
        raise ConfigError(
            f"reading --event-log-handler {values['event_log_handler']!r}: no handler of this name is registered with "
            "torch; give console or null, or register it"
        ) from error
    try:
        config, entrypoint, arguments = config_from_args(asked)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"reading the flags: {error}; see `remesh run --help`") from error
    request = Request(values, request.given, request.script, request.arguments)
    card = _card_of(request, Mode.RESTART)
    return RestartJob(config, entrypoint, tuple(arguments), card, token_of(request), request.node_name)


def _defaults_of_torchrun(request: Request) -> dict[str, Any]:
    """What this torch's launcher expects to find: a newer one has flags unknown to us, an older one lacks some."""
    defaults = vars(get_args_parser().parse_args([_SOME_SCRIPT]))
    for flag in TORCHRUN_FLAGS:
        if flag.dest in request.given and flag.dest not in defaults:
            raise ConfigError(
                f"reading the flags: torch {torch.__version__} has no --{flag.name}; leave it out, or install a newer "
                "torch"
            )
    return defaults


def in_process_job(request: Request) -> AgentConfig:
    """The job in our terms."""
    values = dict(request.values)
    endpoint, hosts_store = _meeting_place(request)
    values["rdzv_id"] = values["rdzv_id"] if endpoint else uuid.uuid4().hex
    conf = _parse_conf(values["rdzv_conf"])
    min_nodes, max_nodes = parse_nnodes(values["nnodes"])
    meeting = MeetingRules(
        min_nodes,
        max_nodes,
        float(conf.get("last_call_timeout", values["last_call"])),
        float(conf.get("join_timeout", values["join_timeout"])),
        absence_timeout_s=2 * values["leave_timeout"],
    )
    exit_timeout_s = EXIT_TIMEOUT_S if values["shutdown_timeout"] is None else float(values["shutdown_timeout"])
    python = () if values["no_python"] else (sys.executable, "-u", *(("-m",) if values["module"] else ()))
    request = Request(values, request.given, request.script, request.arguments)
    return AgentConfig(
        command=(*python, request.script, *request.arguments),
        rules=AgentRules(
            num_workers(values["nproc_per_node"]),
            values["max_restarts"],
            meeting,
            values["leave_timeout"],
            exit_timeout_s,
            values["hang_timeout"],
            ExclusionRules(values["exclude_after"], values["exclude_delay"]),
            StragglerRules(values["exclude_slower"], values["exclude_slower_steps"]),
        ),
        run_id=values["rdzv_id"],
        endpoint=complete_endpoint(endpoint),
        hosts_store=hosts_store if endpoint else True,
        node_name=request.node_name,
        local_address=values["local_addr"],
        log_folder=Path(values["log_dir"]) if values["log_dir"] else None,
        redirects=_streams(values["redirects"]),
        tee=_streams(values["tee"]),
        events_folder=request.events_folder,
        card=_card_of(request, Mode.IN_PROCESS),
        token=token_of(request),
        tls=read_tls(request),
    )


def read_tls(request: Request) -> Tls | None:
    """The files of --tls-cert, --tls-key and --tls-ca, found to be usable; None when none is given."""
    paths = [request.values[dest] for dest in ("tls_cert", "tls_key", "tls_ca")]
    if not any(paths):
        return None
    if not all(paths):
        raise ConfigError(
            f"reading the flags: found {sum(map(bool, paths))} of --tls-cert, --tls-key, --tls-ca; give all three"
        )
    tls = Tls(*(str(Path(path).absolute()) for path in paths))
    tls.context(is_server=True)
    return tls


def describe_uncovered(job: AgentConfig, environment: Mapping[str, str]) -> str | None:
    """What --tls leaves unencrypted between nodes; None when all that Remesh sends to other nodes is encrypted."""
    if job.tls is None or is_loopback(job.local_address) or environment.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS":
        return None
    return (
        f"--tls-cert covers the store and snapshots; collectives on {job.local_address} (gloo, NCCL) are not "
        "encrypted: keep them in a network of their own (WireGuard, IPsec), or give a torch that was built with it "
        "GLOO_DEVICE_TRANSPORT=TCP_TLS (torch 2.13's wheels were not)"
    )


def parse_nnodes(text: str) -> tuple[int, int]:
    """``"2"`` or ``"1:4"`` as (fewest, most) nodes."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise ConfigError(f"reading --nnodes {text!r}: expected N or MIN:MAX with 1 <= MIN <= MAX, as in 1:4")
    return int(low), int(high or low)


def complete_endpoint(endpoint: str) -> str:
    """Each endpoint with its port; a free port of loopback when there is none at all."""
    if endpoint:
        return ",".join(with_port(one, DEFAULT_PORT) for one in split_endpoints(endpoint))
    return f"127.0.0.1:{free_port()}"


def _meeting_place(request: Request) -> tuple[str, bool | None]:
    """Endpoint of the store, empty for a job of this node alone; and whether it is hosted here (None: find out)."""
    values, given = request.values, request.given
    if "rdzv_backend" in given and values["rdzv_backend"] not in ("c10d", "static"):
        raise ConfigError(
            "joining the other nodes: in-process mode meets on a c10d store, found --rdzv-backend "
            f"{values['rdzv_backend']}; leave the flag out, or choose --mode restart"
        )
    if values["standalone"]:
        return "", True
    if values["rdzv_endpoint"]:
        if values["rdzv_id"] == "none":
            raise ConfigError(
                "joining the other nodes: --rdzv-endpoint needs --rdzv-id, the name that all nodes of the job give"
            )
        hosts: bool | None = values["rdzv_host"]
        return values["rdzv_endpoint"], hosts
    if given & {"master_addr", "node_rank", "master_port"}:
        place = join_endpoint(values["master_addr"], values["master_port"] or DEFAULT_MASTER_PORT)
        return place, values["node_rank"] == 0
    return "", True


def _parse_conf(text: str) -> dict[str, str]:
    pairs = [one.partition("=") for one in filter(None, (part.strip() for part in unquoted(text).split(",")))]
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    wrong = sorted(key for key, value in conf.items() if key not in _CONF_KEYS or not value)
    if wrong:
        raise ConfigError(
            f"reading --rdzv-conf {text!r}: in-process mode knows KEY=VALUE for {sorted(_CONF_KEYS)}, found {wrong}"
        )
    return conf


def num_workers(text: str) -> int:
    """How many workers ``--nproc-per-node`` means on this node."""
    try:
        count = int(determine_local_world_size(text))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"reading --nproc-per-node {text!r}: {error}; expected a number, auto, cpu, gpu or xpu"
        ) from error
    if count < 1:
        raise ConfigError(f"reading --nproc-per-node {text!r}: expected 1 or more")
    return count


def _streams(text: str) -> Std:
    try:
        value = Std.from_str(text)
    except ValueError as error:
        raise ConfigError(f"reading stream choice {text!r}: {error}") from error
    if not isinstance(value, Std):
        raise ConfigError(f"reading stream choice {text!r}: in-process mode takes 0, 1, 2 or 3 for all workers")
    return value


def _card_of(request: Request, mode: Mode) -> JobCard:
    min_nodes, max_nodes = parse_nnodes(request.values["nnodes"])
    return JobCard(mode.value, min_nodes, max_nodes, Path(request.script).name)
