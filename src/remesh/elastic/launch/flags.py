"""Which flags has ``remesh run``? One row for each: torchrun's, with torchrun's names, defaults and meaning, and ours.

Names are spelled with ``-``; ``_`` is taken too. Each of torchrun's flags can be given as a variable ``PET_<NAME>``.
``tests/unit/elastic/launch/test_flags.py`` walks torch's own parser and finds every flag of it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SWITCH = "switch"
TEXT, WHOLE, REAL, LIST = "text", "whole", "real", "list"


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
    Flag("rdzv-backend", TEXT, "static", "How nodes meet: static, c10d, etcd. In-process mode meets on c10d."),
    Flag("rdzv-endpoint", TEXT, "", "HOST[:PORT] where the nodes meet; in-process mode takes several, with commas."),
    Flag("rdzv-id", TEXT, "none", "Name of the job, equal on all its nodes."),
    Flag("rdzv-conf", TEXT, "", "KEY=VALUE,... for the meeting: join_timeout, last_call_timeout, is_host, ..."),
    Flag("standalone", SWITCH, False, "A job of this node alone, on a free port."),
    Flag(
        "max-restarts",
        WHOLE,
        0,
        "Restarts of all workers (restart mode, 0), or killed workers to replace here (in-process, 3).",
        in_process_default=3,
    ),
    Flag("monitor-interval", REAL, 0.1, "Seconds between two looks at the workers.", modes=_RESTART),
    Flag(
        "start-method",
        TEXT,
        "spawn",
        "How --run-path starts processes.",
        choices=("spawn", "fork", "forkserver"),
        modes=_RESTART,
    ),
    Flag("event-log-handler", TEXT, "null", "A registered handler for torch's own events.", modes=_RESTART),
    Flag("role", TEXT, "default", "Role of the workers.", modes=_RESTART),
    Flag("module", SWITCH, False, "SCRIPT is a module name, as in `python -m`.", short="m"),
    Flag("no-python", SWITCH, False, "SCRIPT is a program, started without Python."),
    Flag("run-path", SWITCH, False, "Run SCRIPT with runpy.run_path in a started process.", modes=_RESTART),
    Flag("log-dir", TEXT, None, "Folder for logs; every job makes its own folder in it."),
    Flag("redirects", TEXT, "0", "Streams sent to files: 0, 1 (out), 2 (err), 3, or RANK:STREAMS,...", short="r"),
    Flag("tee", TEXT, "0", "Streams sent to files and the console, as --redirects.", short="t"),
    Flag(
        "log-line-prefix-template",
        TEXT,
        "",
        "What begins a line on the console, with ${rank}, ${local_rank}, ${role_name}, ${hostname}; needs torch 2.15.",
        modes=_RESTART,
        is_newer=True,
    ),
    Flag("local-ranks-filter", TEXT, "", "Local ranks whose output the console shows, as 0,2.", modes=_RESTART),
    Flag("duplicate-stdout-filters", LIST, (), "Lines with one of these go to one more file.", modes=_RESTART),
    Flag("duplicate-stderr-filters", LIST, (), "Lines with one of these go to one more file.", modes=_RESTART),
    Flag("node-rank", WHOLE, 0, "Rank of this node, with --master-addr."),
    Flag("master-addr", TEXT, "127.0.0.1", "Address of node 0, where no --rdzv-endpoint is given."),
    Flag("master-port", WHOLE, None, "Port on node 0, with --master-addr (29500)."),
    Flag(
        "local-addr",
        TEXT,
        None,
        "Address on which others reach this node (restart: its host name; in-process: 127.0.0.1).",
        in_process_default="127.0.0.1",
    ),
    Flag(
        "logs-specs",
        TEXT,
        None,
        "Entry point in torchrun.logs_specs that handles logs.",
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
        "Signals to the agent that are handed on to the workers.",
        modes=_RESTART,
    ),
    Flag("shutdown-timeout", WHOLE, None, "Seconds that workers have to end before SIGKILL (30).", is_newer=True),
    Flag(
        "virtual-local-rank",
        SWITCH,
        False,
        "LOCAL_RANK is 0 everywhere; each worker sees its own device only.",
        modes=_RESTART,
    ),
)

OUR_FLAGS = (
    Flag(
        "mode",
        TEXT,
        "auto",
        "auto: in-process if SCRIPT names remesh.elastic, else restart.",
        choices=("auto", "in-process", "restart"),
    ),
    Flag("node-name", TEXT, "", "Name of this node in logs and reports (default: host name)."),
    Flag("events-dir", TEXT, None, "Folder for the event logs (JSON lines)."),
    Flag("metrics-port", WHOLE, None, "Serve OpenMetrics on this port of 127.0.0.1; 0 takes a free one."),
    Flag("token-file", TEXT, None, "File with the job's secret, equal on all nodes (or REMESH_TOKEN)."),
    Flag(
        "tls-cert", TEXT, None, "Certificate of this node, PEM: store and snapshots are encrypted.", modes=_IN_PROCESS
    ),
    Flag("tls-key", TEXT, None, "Its key, PEM.", modes=_IN_PROCESS),
    Flag("tls-ca", TEXT, None, "Certificate of the authority that signed all nodes', PEM.", modes=_IN_PROCESS),
    Flag("rdzv-host", SWITCH, None, "Host the store here, or not; default: as the endpoint says.", modes=_IN_PROCESS),
    Flag("last-call", REAL, 5.0, "Seconds to wait for more than MIN nodes.", modes=_IN_PROCESS),
    Flag("join-timeout", REAL, 600.0, "Seconds to wait for enough nodes.", modes=_IN_PROCESS),
    Flag(
        "leave-timeout",
        REAL,
        30.0,
        "Seconds until a worker that does not leave a broken collective is killed.",
        modes=_IN_PROCESS,
    ),
    Flag(
        "hang-timeout",
        REAL,
        300.0,
        "Seconds without a step until every rank is asked where it stands, and who hangs is killed.",
        modes=_IN_PROCESS,
    ),
    Flag(
        "exclude-after",
        WHOLE,
        0,
        "Failures after which a node holds off longer and longer before it comes back; 0: never.",
        modes=_IN_PROCESS,
    ),
    Flag("exclude-delay", REAL, 30.0, "Seconds that it holds off at first; doubles each time.", modes=_IN_PROCESS),
    Flag(
        "exclude-slower",
        REAL,
        0.0,
        "Leave out a worker that works so many times as long per step as the others' median; 0: never.",
        modes=_IN_PROCESS,
    ),
    Flag("exclude-slower-steps", WHOLE, 100, "For how many steps it must do so.", modes=_IN_PROCESS),
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
