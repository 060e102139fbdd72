"""The second engine: CRIU, where 4.1 or newer is installed. Older ones fail on kernels from 6.13 on.

CRIU runs inside the namespaces of the upper half, so that ids and paths are what the process itself sees, and images
of several ranks may be taken at once. Beside its own files stands what it does not hold: the channel, the clocks, and
the lengths of the logs, which it wants to find again: output written since is cut off, a shorter log gets zeros.
It makes full images only, and decides for itself about open files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from remesh.carried.images.form.clocks import Clocks, clocks_of
from remesh.carried.images.form.format import CRIU_FILE
from remesh.carried.images.form.kinds import ARENA_PATH, CHANNEL_PATH, SHARED_PATH, STDERR_PATH, STDOUT_PATH
from remesh.carried.images.form.records import from_json, to_json
from remesh.carried.images.form.store import make_folder
from remesh.foundation.errors import ConfigError, FormatError
from remesh.foundation.files import flush
from remesh.foundation.linux.procfs import read_areas, read_status, seen_from_here

_OLDEST: Final = (4, 1)
_TIMEOUT_S: Final = 20.0
_WORK_TIMEOUT_S: Final = 3600.0
_FOLDER: Final = "criu"
_CHANNEL: Final = "channel.bin"
_LOG: Final = "criu.log"
_SHOWN_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Criu:
    """A CRIU on the PATH."""

    path: str
    version: str  # "4.1.1"; "" when it does not tell

    @property
    def is_able(self) -> bool:
        """Whether its version is new enough."""
        return version_of(self.version) >= _OLDEST


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version.

    >>> version_of("4.1.1") >= (4, 1), version_of("3.17.1") >= (4, 1), version_of("")
    (True, False, ())
    """
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def find_criu() -> Criu | None:
    """The CRIU on the PATH, if any."""
    path = shutil.which("criu")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Criu(path, "")
    match = re.search(r"Version:\s*(\S+)", done.stdout)
    return Criu(path, match.group(1) if match else "")


# --- images ---


@dataclass(frozen=True, slots=True)
class CriuImage:
    """``criu.json``: the facts that CRIU's own files do not hold."""

    version: str  # of CRIU
    pid: int  # of the process, in its own pid namespace
    stdout_bytes: int
    stderr_bytes: int
    monotonic_ns: int
    boottime_ns: int

    @property
    def clocks(self) -> Clocks:
        """The clocks of the process, as it saw them."""
        return Clocks(self.monotonic_ns, self.boottime_ns)


def read_criu_image(directory: Path) -> CriuImage:
    """Read the record beside CRIU's files. Raises `FormatError` when it is damaged."""
    path = directory / CRIU_FILE
    try:
        return from_json(CriuImage, json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError) as error:
        raise FormatError("bad-json", f"reading {path}: {error}; restart from another image") from error


def dump_by_criu(pid: int, directory: Path) -> int:
    """Write an image of an upper half into a new folder by CRIU, flushed; returns its bytes. The half then goes on.

    It must lead a session (``Command.leads_session``). Raises `ConfigError` with CRIU's own words when it refuses;
    nothing is left behind then.
    """
    doing = f"dumping process {pid} by CRIU"
    criu = _need_criu(doing)
    *outer_pids, inner_pid = read_status(pid)["NSpid"].split()
    if not outer_pids:
        raise ConfigError(f"{doing}: it was not started as a program that can be imaged (start_upper)")
    areas = read_areas(pid)
    if any(area.path == ARENA_PATH for area in areas):
        raise ConfigError(
            f"{doing}: its arrays are in shared memory, which CRIU does not save; run it without shared arrays"
        )
    if any(area.path.startswith(SHARED_PATH) for area in areas):
        raise ConfigError(
            f"{doing}: it shares memory with other programs, which CRIU does not save; use Remesh's own engine"
        )
    make_folder(directory)
    try:
        work = directory.absolute() / _FOLDER
        work.mkdir(mode=0o700)
        enter = ("nsenter", "--target", str(pid), "--mount", "--pid", "--time")
        action = ("dump", "--tree", inner_pid, "--images-dir", str(work), "--shell-job", "--leave-stopped")
        _run((*enter, criu.path, *action, "--log-file", _LOG), work, doing)
        # The upper half stands still until SIGCONT: what is read here belongs to the image.
        lengths = [os.stat(seen_from_here(pid, path)).st_size for path in (STDOUT_PATH, STDERR_PATH)]
        (directory / _CHANNEL).write_bytes(Path(seen_from_here(pid, CHANNEL_PATH)).read_bytes())
        beside = CriuImage(criu.version, int(inner_pid), lengths[0], lengths[1], *clocks_of(pid))
        (directory / CRIU_FILE).write_text(json.dumps(to_json(beside)))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        os.kill(pid, signal.SIGCONT)
    paths = [path for path in directory.rglob("*") if path.is_file()]
    for path in (*paths, directory):
        flush(path)
    return sum(path.stat().st_size for path in paths)


def bring_back_by_criu(directory: Path) -> None:
    """Make the process of an image of CRIU's a child of this one; called by our init, inside the namespaces."""
    doing = f"restoring {directory} by CRIU"
    criu, image = _need_criu(doing), read_criu_image(directory)
    with open(CHANNEL_PATH, "r+b", buffering=0) as file:
        file.write((directory / _CHANNEL).read_bytes())
    os.truncate(STDOUT_PATH, image.stdout_bytes)
    os.truncate(STDERR_PATH, image.stderr_bytes)
    work = directory.absolute() / _FOLDER
    action = ("restore", "--images-dir", str(work), "--shell-job", "--restore-detached", "--work-dir", str(work))
    _run((criu.path, *action, "--log-file", f"restore-{_LOG}"), work, doing)
    os.kill(image.pid, signal.SIGCONT)


def _need_criu(doing: str) -> Criu:
    criu = find_criu()
    if criu is None or not criu.is_able:
        found = "none" if criu is None else f"{criu.version or 'one that does not tell its version'} at {criu.path}"
        raise ConfigError(f"{doing}: expected CRIU 4.1 or newer on the PATH, found {found}; install it")
    return criu


def _run(command: Sequence[str], work: Path, doing: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WORK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{doing}: `{command[0]}` did not run: {error}; install it, or use Remesh's own engine"
        ) from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-_SHOWN_CHARS:]
        raise ConfigError(f"{doing}: it ended with {done.returncode}: {words}; its log is in {work}")
