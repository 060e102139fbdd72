"""Network namespaces of testbeds in the kernel: running `ip` and `tc`, finding testbeds, taking them apart.

A testbed lives in the kernel, not in the process that made it: killed owners leave namespaces behind. Every name
carries its owner, so that `clean` can distinguish leftovers from testbeds in use, and no two testbeds have one name.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from remesh.foundation.errors import ConfigError
from remesh.foundation.linux.procfs import start_of
from remesh.testbed.commands import Command, command_to_remove
from remesh.testbed.testbed_spec import NamespaceName, Owner

FOLDER = Path("/run/netns")
"""Where `ip netns` keeps the names of namespaces."""
_BED_FOLDER = re.compile(r"remesh-testbed-(\d+)-(\d+)-\w+")
_COMMAND_TIMEOUT_S = 20.0
_DEATH_TIMEOUT_S = 5.0
_POLL_S = 0.01


def check_able() -> None:
    """Raise a `ConfigError` that names what is missing when this process cannot make a testbed."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(
                f"making a testbed: {tool!r} is not on the path, expected the tools of iproute2; install the package "
                "iproute2"
            )
    if os.geteuid() != 0:
        raise ConfigError(
            f"making a testbed: this process runs as user {os.geteuid()}, expected root (0), who alone may make "
            "network namespaces; run it with sudo"
        )


def run_commands(commands: Iterable[Command], doing: str) -> None:
    """Run the commands in order; a `ConfigError` with the words of the first one that fails."""
    for command in commands:
        run_command(command, doing)


def run_command(command: Command, doing: str) -> str:
    """Run one command; what it printed. Raises `ConfigError` when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{doing}: `{' '.join(command)}` did not run: {error}; see that iproute2 is whole") from error
    if done.returncode:
        raise ConfigError(
            f"{doing}: `{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip() or 'no reason given'}; "
            "the kernel may lack namespaces, veth, bridge or tbf, or this container the right to use them"
        )
    return done.stdout


def this_owner() -> Owner:
    """This process as the owner of testbeds."""
    started = start_of(os.getpid())
    assert started is not None
    return Owner(os.getpid(), started)


def is_alive(owner: Owner) -> bool:
    """Whether the process that made a testbed still lives."""
    return start_of(owner.pid) == owner.started_ticks


def find_namespaces() -> list[NamespaceName]:
    """All namespaces of all testbeds on this machine, in order of name."""
    try:
        names = sorted(os.listdir(FOLDER))
    except FileNotFoundError:
        return []
    return [name for text in names if (name := NamespaceName.parse(text)) is not None]


def group_by_testbed(names: Iterable[NamespaceName]) -> Mapping[tuple[Owner, int], list[NamespaceName]]:
    """Namespaces by owner and testbed."""
    beds: dict[tuple[Owner, int], list[NamespaceName]] = {}
    for name in names:
        beds.setdefault((name.owner, name.bed), []).append(name)
    return beds


def clean() -> list[NamespaceName]:
    """Remove what dead owners have left, with the processes in it; what was removed."""
    left = [name for name in find_namespaces() if not is_alive(name.owner)]
    remove([str(name) for name in left])
    remove_folders_of_the_dead()
    return left


def make_folder(owner: Owner) -> Path:
    """A new folder for the files of a testbed; its name has the owner."""
    return Path(tempfile.mkdtemp(prefix=f"remesh-testbed-{owner.pid}-{owner.started_ticks}-"))


def remove_folders_of_the_dead() -> None:
    """Remove the folders of testbeds whose owner and watchdog were killed."""
    for folder in Path(tempfile.gettempdir()).iterdir():
        match = _BED_FOLDER.fullmatch(folder.name)
        if match is not None and not is_alive(Owner(int(match[1]), int(match[2]))):
            shutil.rmtree(folder, ignore_errors=True)


def remove(namespaces: Sequence[str]) -> None:
    """Kill what runs in these namespaces and remove them; those that are gone already are left out."""
    present = [name for name in namespaces if (FOLDER / name).exists()]
    _end_processes_in(present)
    for name in present:
        try:
            run_command(command_to_remove(name), f"removing {name}")
        except ConfigError:
            # Two cleaners may meet: the second finds nothing.
            if (FOLDER / name).exists():
                raise


def processes_in(namespaces: Sequence[str]) -> list[int]:
    """Ids of the processes whose network is one of these namespaces."""
    wanted = set()
    for name in namespaces:
        with contextlib.suppress(FileNotFoundError):
            status = (FOLDER / name).stat()
            wanted.add((status.st_dev, status.st_ino))
    found = []
    for entry in os.listdir("/proc"):
        # A process may end at any moment of this look.
        with contextlib.suppress(OSError):
            if entry.isdecimal():
                status = os.stat(f"/proc/{entry}/ns/net")
                if (status.st_dev, status.st_ino) in wanted:
                    found.append(int(entry))
    return found


def _end_processes_in(namespaces: Sequence[str]) -> None:
    deadline_s = time.monotonic() + _DEATH_TIMEOUT_S
    while (pids := processes_in(namespaces)) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
