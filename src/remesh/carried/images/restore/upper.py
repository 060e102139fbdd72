"""Start, restore and end of an upper half, by a small init in namespaces of its own.

`start_upper` and `restore_upper` are for the lower half; both return the running process as an `Upper`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from remesh.carried.images.form.kinds import SITE_PATH, Command, OpenFilePolicy, Site
from remesh.carried.images.form.platforms import check_platform
from remesh.carried.images.look.frozen_registry import bury, thaw_if_killed
from remesh.carried.images.restore.starter import Starter
from remesh.foundation.errors import ConfigError, FormatError, StorageError
from remesh.foundation.linux import procfs
from remesh.foundation.linux.calls import PR_SET_CHILD_SUBREAPER, prctl

_END_GRACE_S: Final = 30.0
_POLL_S: Final = 0.001


class Upper:
    """A running upper half, seen from the lower half."""

    def __init__(self, init_pid: int, pid: int, orders: int, news: int) -> None:
        self.pid = pid
        """The process id of the upper half as this process sees it: for process_vm_readv, freeze and dump_image."""
        self.note = ""
        """A note for its user on how it was brought back; "" if there is none."""
        self._init_pid = init_pid
        self._orders = orders
        self._news = news
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def fileno(self) -> int:
        """A descriptor that is readable once the upper half has ended; for select and poll."""
        return self._pidfd

    def poll(self) -> int | None:
        """Return None while the upper half runs; then its exit status, or minus the signal that ended it."""
        if self._status is None:
            thaw_if_killed(self.pid)
        if self._status is None and select.select([self._pidfd], [], [], 0)[0]:
            self._status = self._read_status()
        return self._status

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the exit status; TimeoutError if the upper half runs on after ``timeout_s``."""
        select.select([self._pidfd], [], [], timeout_s)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"waiting for the upper half (process {self.pid}): it still runs after {timeout_s} s")
        return status

    def kill(self) -> None:
        """Kill the upper half and everything in its namespaces; no error if it has ended."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init_pid, signal.SIGKILL)
            bury(self.pid)
            select.select([self._pidfd], [], [], _END_GRACE_S)
            self._status = self._read_status()

    def close(self) -> None:
        """Kill the upper half if it runs, and close what this object holds."""
        self.kill()
        for descriptor in (self._pidfd, self._orders, self._news):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._pidfd = self._orders = self._news = -1

    def _read_status(self) -> int:
        """Read the status from init, which sends none if it was killed itself, and all others with it."""
        status = -signal.SIGKILL
        for line in _lines(self._news, _END_GRACE_S):
            if line.get("event") == "ended":
                status = int(line["status"])
        deadline_s = time.monotonic() + _END_GRACE_S
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._init_pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        return status


def start_upper(command: Command, site: Site, *, starter: Starter | None = None, timeout_s: float = 60.0) -> Upper:
    """Start a program in namespaces of its own, with the process id of its command inside.

    ``starter`` is taken for good; without one an interpreter is started.

    Its stdin is the command's input file, its stdout and stderr are the site's files, it inherits no other descriptor.
    It ends when this process ends. Makes this process a child subreaper. Raises `ConfigError` when the kernel or the
    rights of this process do not allow it, or when the program or its input file does not exist.
    """
    order = {
        "argv": list(command.argv),
        "environment": dict(command.environment),
        "folder": command.folder,
        "input_file": command.input_file,
        "input_position": command.input_position,
        "pid": command.pid,
    }
    return _start(order, site, starter, f"starting {command.argv[0]} as an upper half", timeout_s)


def restore_upper(
    image: Path,
    site: Site,
    *,
    open_files: OpenFilePolicy | None = OpenFilePolicy.TRUNCATE,
    starter: Starter | None = None,
    timeout_s: float = 600.0,
) -> Upper:
    """Bring the process of an image back, with the ids, memory, registers and open files it had; it runs on at once.

    The bytes of its channel are written into ``site.channel_file`` first. ``starter`` as `start_upper` takes it.
    ``open_files`` is None where all files that it writes to have been checked and cut (`form.written_files`). Raises
    `FormatError` when the image is damaged or does not fit this machine, `StorageError` when a file it had open is gone
    or changed.
    """
    order = {"image": str(Path(image).absolute()), "open_files": open_files and open_files.value}
    return _start(order, site, starter, f"restoring {image}", timeout_s)


# --- the way to init and back ---


def _start(order: dict[str, Any], site: Site, starter: Starter | None, doing: str, timeout_s: float) -> Upper:
    check_platform()
    _make_room()
    for path in filter(None, (site.channel_file, site.stdout_file, site.stderr_file, site.arena_file)):
        if not os.path.isfile(path):
            raise ConfigError(f"{doing}: the file {path} is missing; make it before")
    if site.shared_folder and not os.path.isdir(site.shared_folder):
        raise ConfigError(f"{doing}: the folder {site.shared_folder} is missing; make it before")
    order["site"] = {
        "channel_file": site.channel_file,
        "stdout_file": site.stdout_file,
        "stderr_file": site.stderr_file,
        "arena_file": site.arena_file,
        "shared_folder": site.shared_folder,
    }
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    starter = starter or Starter.spawn()
    orders, news = starter.orders, starter.news
    init_pid, program, note = 0, 0, ""
    lines = _lines(news, timeout_s)
    try:
        _send(orders, order, doing)
        for line in lines:
            _raise_failure(line, doing)
            if line["event"] == "init":
                init_pid = int(line["pid"])
            if line["event"] == "running":
                program, note = int(line["program"]), str(line["note"])
            # Two processes write into one pipe: either may come first.
            if init_pid and program:
                os.waitpid(starter.pid, 0)
                upper = Upper(init_pid, _find_upper(init_pid, program), orders, news)
                upper.note = note
                os.write(orders, b"!")
                return upper
        raise ConfigError(
            f"{doing}: it did not start within {timeout_s} s; `remesh mpi doctor` shows what this machine lacks"
        )
    except BaseException:
        init_pid = init_pid or next((int(line["pid"]) for line in lines if line["event"] == "init"), 0)
        if init_pid:
            with contextlib.suppress(OSError):
                os.kill(init_pid, signal.SIGKILL)
                os.waitpid(init_pid, 0)
        starter.close()
        raise


def _send(orders: int, order: dict[str, Any], doing: str) -> None:
    data = json.dumps(order).encode()
    data = len(data).to_bytes(8, "little") + data
    try:
        while data:
            data = data[os.write(orders, data) :]
    except BrokenPipeError as error:
        raise ConfigError(f"{doing}: its init ended at once; see the standard error output") from error


def _lines(news: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Read the lines of init; ends when init does or the time is over."""
    deadline, buffer = time.monotonic() + timeout_s, b""
    while True:
        readable, _, _ = select.select([news], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(news, 65536) if readable else b""
        if not data:
            return
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            yield json.loads(line)


def _raise_failure(line: dict[str, Any], doing: str) -> None:
    if line["event"] != "failed":
        return
    message = str(line["message"])
    if line["kind"] == "FormatError":
        raise FormatError(str(line["reason"]), message)
    if line["kind"] == "StorageError":
        raise StorageError(message)
    raise ConfigError(message if message.startswith(doing) else f"{doing}: {message}")


def _find_upper(init_pid: int, program: int) -> int:
    """Find the id, as this process sees it, of the child of init whose inner id is ``program``."""
    for pid in procfs.children_of(init_pid):
        if procfs.inner_id(pid, pid) == program:
            return pid
    raise ConfigError(
        f"starting an upper half: it ended before it could be attached to (its init is process {init_pid})"
    )


def _make_room() -> None:
    """Make the folder that is covered in every upper half's mount namespace. Nothing is ever written into it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(SITE_PATH, 0o755)
    found = os.lstat(SITE_PATH)
    if not stat.S_ISDIR(found.st_mode):
        what = f"{SITE_PATH} is no folder, but something of user {found.st_uid}"
        raise ConfigError(f"starting an upper half: {what}; that user, or root, must remove it")
