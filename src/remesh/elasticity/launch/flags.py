"""Table of ``remesh run``'s flags: torchrun's, with the same names, defaults and meaning, and our own.

Names are spelled with ``-``; ``_`` is taken too. Each of torchrun's flags can be given as a variable ``PET_<NAME>``.
``tests/unit/elasticity/launch/test_flags.py`` walks torch's own parser and finds every flag of it here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

SWITCH = "switch"
TEXT, WHOLE, REAL, LIST = "text", "whole", "real", "list"


class Mode(enum.Enum):
    """How workers are looked after."""

    IN_PROCESS = "in-process"
    """The script calls :func:`remesh.elastic`; survivors of a failure keep their processes."""
    RESTART = "restart"
    """Any script that torchrun can start; all workers are started anew after a failure."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of ``remesh run``."""

    name: str
    """Without the dashes."""
    kind: str
    """TEXT, WHOLE (int), REAL (float), SWITCH, or LIST (comma-separated, ``,,`` for a comma)."""
    default: Any
    help: str
    short: str = ""
    """One letter, without the dash."""
    choices: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("restart", "in-process")
    """Where it means something; elsewhere it is refused when given."""
    in_process_default: Any = None
    """Default in in-process mode where that differs."""
    from_environment: bool = True
    """Whether ``PET_<NAME>`` sets it."""
    is_newer: bool = False
    """Whether some torch that we run with lacks it; given with such a one, it is refused."""

    @property
    def dest(self) -> str:
        """Name of the value in Python."""
        return self.name.replace("-", "_")


_RESTART = ("restart",)
_IN_PROCESS = ("in-process",)

TORCHRUN_FLAGS = (
    Flag("nnodes", TEXT, "1:1", "Nodes of the job: N, or MIN:MAX for an elastic job."),
    Flag("nproc-per-node", TEXT, "1", "Workers on this node: a number, auto, cpu, gpu or xpu."),
    Flag("rdzv-backend", TEXT, "static", "Rendezvous backend: static, c10d or etcd. In-process mode uses c10d."),
    Flag(
        "rdzv-endpoint", TEXT, "", "HOST[:PORT] of the rendezvous; in-process mode takes several, separated by commas."
    ),
    Flag("rdzv-id", TEXT, "none", "Name of the job, the same on all its nodes."),
    Flag(
        "rdzv-conf",
        TEXT,
        "",
        "Options of the rendezvous as KEY=VALUE,...: join_timeout, last_call_timeout, is_host and others.",
    ),
    Flag("standalone", SWITCH, False, "Run the job on this node alone, on a free port."),
    Flag(
        "max-restarts",
        WHOLE,
        0,
        "Restart mode: restarts of all workers (0). In-process: killed workers that this node replaces (3).",
        in_process_default=3,
    ),
    Flag("monitor-interval", REAL, 0.1, "Seconds between two checks of the workers.", modes=_RESTART),
    Flag(
        "start-method",
        TEXT,
        "spawn",
        "Start method of the processes of --run-path.",
        choices=("spawn", "fork", "forkserver"),
        modes=_RESTART,
    ),
    Flag("event-log-handler", TEXT, "null", "Name of a registered handler for torch's own events.", modes=_RESTART),
    Flag("role", TEXT, "default", "Role of the workers.", modes=_RESTART),
    Flag("module", SWITCH, False, "Treat SCRIPT as a module name, as `python -m` does.", short="m"),
    Flag("no-python", SWITCH, False, "Start SCRIPT as a program, without Python."),
    Flag("run-path", SWITCH, False, "Run SCRIPT with runpy.run_path in a new process.", modes=_RESTART),
    Flag("log-dir", TEXT, None, "Folder for logs; each job makes a folder of its own in it."),
    Flag(
        "redirects",
        TEXT,
        "0",
        "Write streams to files: 0 (none), 1 (stdout), 2 (stderr), 3 (both), or RANK:STREAMS,... by rank.",
        short="r",
    ),
    Flag("tee", TEXT, "0", "Write streams to files and to the console; values as for --redirects.", short="t"),
    Flag(
        "log-line-prefix-template",
        TEXT,
        "",
        "Prefix of lines on the console, with ${rank}, ${local_rank}, ${role_name}, ${hostname}; needs torch 2.15.",
        modes=_RESTART,
        is_newer=True,
    ),
    Flag(
        "local-ranks-filter", TEXT, "", "Local ranks whose output is shown on the console, as in 0,2.", modes=_RESTART
    ),
    Flag(
        "duplicate-stdout-filters",
        LIST,
        (),
        "Copy lines that contain one of these texts to another file.",
        modes=_RESTART,
    ),
    Flag(
        "duplicate-stderr-filters",
        LIST,
        (),
        "Copy lines that contain one of these texts to another file.",
        modes=_RESTART,
    ),
    Flag("node-rank", WHOLE, 0, "Rank of this node; used with --master-addr."),
    Flag("master-addr", TEXT, "127.0.0.1", "Address of node 0, if there is no --rdzv-endpoint."),
    Flag("master-port", WHOLE, None, "Port on node 0 (29500); used with --master-addr."),
    Flag(
        "local-addr",
        TEXT,
        None,
        "Address at which other nodes reach this one (restart: its host name; in-process: 127.0.0.1).",
        in_process_default="127.0.0.1",
    ),
    Flag(
        "logs-specs",
        TEXT,
        None,
        "Name of an entry point in torchrun.logs_specs that handles logs.",
        modes=_RESTART,
        from_environment=False,
    ),
    Flag(
        "numa-binding",
        TEXT,
        None,
        "Bind workers to CPUs near their devices.",
        choices=("node", "socket", "exclusive", "core-complex"),
        modes=_RESTART,
        from_environment=False,
    ),
    Flag(
        "signals-to-handle",
        TEXT,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "Signals that the agent passes on to the workers.",
        modes=_RESTART,
    ),
    Flag(
        "shutdown-timeout",
        WHOLE,
        None,
        "Seconds between SIGTERM and SIGKILL for workers that are stopped (30).",
        is_newer=True,
    ),
    Flag(
        "virtual-local-rank",
        SWITCH,
        False,
        "Set LOCAL_RANK to 0 in every worker, which then sees its own device only.",
        modes=_RESTART,
    ),
)

OUR_FLAGS = (
    Flag(
        "mode",
        TEXT,
        Mode.IN_PROCESS.value,
        "In-process mode is for a SCRIPT that calls remesh.elastic, restart mode for any that torchrun starts.",
        choices=tuple(mode.value for mode in Mode),
    ),
    Flag("node-name", TEXT, "", "Name of this node in logs and reports (default: host name)."),
    Flag("events-dir", TEXT, None, "Folder for the event logs (JSON lines)."),
    Flag("metrics-port", WHOLE, None, "Serve OpenMetrics on this port of 127.0.0.1; 0 takes a free one."),
    Flag(
        "token-file",
        TEXT,
        None,
        "File with the job's secret, the same on all nodes; the variable REMESH_TOKEN does as well.",
    ),
    Flag(
        "tls-cert",
        TEXT,
        None,
        "Certificate of this node (PEM); traffic of the store and of snapshots is then encrypted.",
        modes=_IN_PROCESS,
    ),
    Flag("tls-key", TEXT, None, "Private key of --tls-cert (PEM).", modes=_IN_PROCESS),
    Flag(
        "tls-ca",
        TEXT,
        None,
        "Certificate (PEM) of the authority that signed the certificates of all nodes.",
        modes=_IN_PROCESS,
    ),
    Flag(
        "rdzv-host",
        SWITCH,
        None,
        "Host the store on this node, or not; by default the node at the endpoint does.",
        modes=_IN_PROCESS,
    ),
    Flag("last-call", REAL, 5.0, "Seconds to wait for further nodes once MIN nodes are there.", modes=_IN_PROCESS),
    Flag("join-timeout", REAL, 600.0, "Seconds to wait for MIN nodes.", modes=_IN_PROCESS),
    Flag(
        "leave-timeout",
        REAL,
        30.0,
        "Seconds after which a worker is killed that does not leave a broken collective.",
        modes=_IN_PROCESS,
    ),
    Flag(
        "hang-timeout",
        REAL,
        300.0,
        "Seconds without a step after which the stacks of all ranks are compared and the hanging rank is killed.",
        modes=_IN_PROCESS,
    ),
    Flag(
        "exclude-after",
        WHOLE,
        0,
        "Failures of a node after which it waits before it rejoins, each time longer; 0 means never.",
        modes=_IN_PROCESS,
    ),
    Flag(
        "exclude-delay",
        REAL,
        30.0,
        "Seconds that an excluded node or worker waits at first; the time doubles with each exclusion.",
        modes=_IN_PROCESS,
    ),
    Flag(
        "exclude-slower",
        REAL,
        0.0,
        "Exclude a worker whose busy time per step is more than this many times the others' median; 0 means never.",
        modes=_IN_PROCESS,
    ),
    Flag(
        "exclude-slower-steps",
        WHOLE,
        100,
        "Number of steps over which --exclude-slower compares busy times.",
        modes=_IN_PROCESS,
    ),
)

FLAGS = TORCHRUN_FLAGS + OUR_FLAGS


def find_flag(dest: str) -> Flag:
    """The row whose value has this name."""
    return next(flag for flag in FLAGS if flag.dest == dest)


def complete_name(name: str) -> str:
    """A flag's name from another spelling or a beginning that only it has, as argparse takes them.

    >>> complete_name("nproc_per")
    'nproc-per-node'
    """
    name = name.replace("_", "-")
    names = [flag.name for flag in FLAGS] + ["no-rdzv-host", "help"]
    if len(name) <= 1 or name in names:
        return name
    begin = [one for one in names if one.startswith(name)]
    return begin[0] if len(begin) == 1 else name
