"""Init process of an upper half: first of its pid namespace, parent of the program, reaper of orphans.

Begun by a `starter` with two descriptors: ``orders`` (one JSON object, then the sender keeps it open: when it closes,
the lower half has ended, and so does everything here) and ``news`` (JSON lines back to it). The starter leaves for new
namespaces and forks the true init, which the lower half, a subreaper, inherits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from remesh.carried.images.form.kinds import STDERR_PATH, STDOUT_PATH, OpenFilePolicy, Site
from remesh.carried.images.restore import process_namespaces
from remesh.carried.images.restore.reaper import reap_until_the_end, tell
from remesh.foundation.errors import ConfigError, Error, FormatError, StorageError

if TYPE_CHECKING:
    from remesh.carried.images.restore.comeback import Comeback

_MAX_ORDER_BYTES: Final = 64 << 20
_EXEC_FAILED: Final = 127


def main() -> None:
    """Run as ``python -m remesh.carried.images.restore.init ORDERS NEWS``, descriptors by number."""
    serve(int(sys.argv[1]), int(sys.argv[2]))


def serve(orders: int, news: int) -> NoReturn:
    """Wait for the order, start the init in new namespaces, and end."""
    try:
        _close_all_but({orders, news})
        order = _read_order(orders)
        os.set_inheritable(orders, False)
        os.set_inheritable(news, False)
        pid = _start_in_namespaces(order, orders, news)
    except BaseException as error:
        _report_failure(news, error)
        os._exit(1)
    tell(news, {"event": "init", "pid": pid})
    os._exit(0)


def _read_order(orders: int) -> dict[str, Any]:
    length = int.from_bytes(_read_exactly(orders, 8), "little")
    if length > _MAX_ORDER_BYTES:
        raise ValueError(f"an order of {length} bytes")
    order: dict[str, Any] = json.loads(_read_exactly(orders, length))
    return order


def _read_exactly(descriptor: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = os.read(descriptor, num_bytes - len(data))
        if not part:
            raise EOFError("the lower half ended before it sent what to start")
        data += part
    return data


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


def _start_in_namespaces(order: dict[str, Any], orders: int, news: int) -> int:
    process_namespaces.leave_for_new_namespaces()
    image = None
    if "image" in order:
        from remesh.carried.images.restore.comeback import Comeback  # noqa: PLC0415  a program that begins does not pay for it

        # The fork takes the image along.
        image = Comeback.read(Path(order["image"]))
        image.set_clocks()
    pid = os.fork()
    if pid == 0:
        try:
            _be_init(order, image, orders, news)
        except BaseException as error:
            _report_failure(news, error)
            os._exit(1)
    return pid


def _be_init(order: dict[str, Any], image: Comeback | None, orders: int, news: int) -> NoReturn:
    process_namespaces.leave_group()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    process_namespaces.mount_site(Site(**order["site"]))
    note = ""
    if image is not None:
        program = image.pid
        policy = order["open_files"]
        note = image.bring_back(None if policy is None else OpenFilePolicy(policy))
    else:
        program = order["pid"]
        _start_program(order)
    tell(news, {"event": "running", "program": program, "note": note})
    reap_until_the_end(orders, news, program)


def _start_program(order: dict[str, Any]) -> None:
    """Fork and execute the program; raises what went wrong in the child before it became the program."""
    report_out, report_in = os.pipe2(os.O_CLOEXEC)
    process_namespaces.choose_next_pid(order["pid"])
    pid = os.fork()
    if pid == 0:
        try:
            process_namespaces.leave_group()
            _become_clean(order["input_file"])
            if order["input_position"]:
                os.lseek(0, order["input_position"], os.SEEK_SET)
            os.chdir(order["folder"])
            os.execvpe(order["argv"][0], order["argv"], order["environment"])
        except OSError as error:
            os.write(report_in, f"{os.fsdecode(error.filename or order['argv'][0])}: {error.strerror}".encode())
        os._exit(_EXEC_FAILED)
    os.close(report_in)
    failure = os.read(report_out, 4096)
    os.close(report_out)
    if failure:
        raise ConfigError(
            f"{failure.decode(errors='replace')}; see the paths of the program, its input file and its folder"
        )
    if pid != order["pid"]:
        raise RuntimeError(f"starting {order['argv'][0]}: it got process id {pid}, expected {order['pid']}")


def _become_clean(input_file: str) -> None:
    """Standard descriptors on input file and logs, default signal actions, nothing blocked, nothing inherited."""
    for number, path, flags in (
        (0, input_file, os.O_RDONLY),
        (1, STDOUT_PATH, os.O_WRONLY | os.O_APPEND),
        (2, STDERR_PATH, os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(path, flags | os.O_CLOEXEC)
        os.dup2(opened, number)
        os.close(opened)
    process_namespaces.forget_signal_actions()


def _report_failure(news: int, error: BaseException) -> None:
    kind = "StorageError" if isinstance(error, StorageError) else "ConfigError"
    reason = ""
    if isinstance(error, FormatError):
        kind, reason = "FormatError", error.reason
    hint = "`remesh mpi doctor` shows what this machine lacks"
    message = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}; {hint}"
    tell(news, {"event": "failed", "kind": kind, "reason": reason, "message": message})


if __name__ == "__main__":
    main()
