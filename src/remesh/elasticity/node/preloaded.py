"""The process of which workers are forked: Python with modules loaded, stopped just before it would run the script.

It is started with the command line of a worker, ``python -u script.py args``. Python imports ``sitecustomize`` when all
but the script is ready, and finds ours (:mod:`remesh.elasticity.node.preload_site`), which calls :func:`serve`:

1. load the modules, and check that nothing stands in the way of forking;
2. for each request fork a worker, twice, so that the agent becomes its parent;
3. in the worker: take its streams, environment and random numbers, return. Python itself goes on to the script.

So there is no second way to run a script: ``__main__``, ``sys.argv``, tracebacks, the end and its exit code are
Python's own, without a frame of ours. The other end is :mod:`remesh.elasticity.node.preload`.

A request is one packet with descriptors: a memory file with JSON (the environment), the three streams, and a pipe. A
worker begins when a byte comes through the pipe; when it closes without, the agent does not want it any more.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import socket
import sys
import time
from collections.abc import Collection
from importlib.machinery import all_suffixes
from typing import Any, TextIO

from remesh.elasticity.node.surroundings import ignore_signals, read_surroundings
from remesh.foundation.exit_codes import ExitCode

ORDER = "REMESH_PRELOAD"
"""The variable with the order: the descriptor of the socket, the modules, ``PYTHONPATH`` as it was, the command."""
NUM_DESCRIPTORS = 5
MAX_ANSWER_BYTES = 1 << 16
_STANDARD = (("stdin", 0, "rb"), ("stdout", 1, "wb"), ("stderr", 2, "wb"))


def as_text(data: str) -> str:
    """What the system calls this name, byte for byte, as text that JSON carries."""
    return os.fsencode(data).decode("latin-1")


def as_bytes(text: str) -> bytes:
    """The bytes that `as_text` was given: a worker's locale may have no letters for what the agent's has."""
    return text.encode("latin-1")


class _UnfitError(Exception):
    """Workers must not be forked of this process; the text says why."""


def serve(hook_folder: str, loaded_by_python: Collection[str]) -> None:
    """Load what the agent ordered, then fork at each request. Returns in a worker alone; the process itself exits."""
    order = json.loads(os.environ[ORDER])
    if (command := order.pop("command")) is not None:
        # Had Python not come here, it would have run nothing: only now it is given the script.
        os.environ[ORDER] = json.dumps({**order, "command": None})
        arguments = [as_bytes(part) for part in command]
        os.execv(arguments[0], arguments)
    _hide_hook(hook_folder, order["path"])
    line = socket.socket(fileno=order["socket"])
    try:
        _check_streams(line.fileno())
        for name in order["modules"]:
            importlib.import_module(name)
        check_fit_to_fork(line.fileno(), loaded_by_python)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, _UnfitError) else f"{type(error).__name__}: {error}"
        _answer(line, {"unfit": reason[:1000]})
        os._exit(ExitCode.OK)
    gc.collect()
    # What is there stays for good; a worker's collector would copy its pages for nothing.
    gc.freeze()
    fork_workers(line)


def fork_workers(line: socket.socket) -> None:
    """Say that all is loaded, then fork at each request. Returns in a worker alone; the process itself exits."""
    _answer(line, {"surroundings": read_surroundings()})
    while True:
        _, descriptors, _, _ = socket.recv_fds(line, 1, NUM_DESCRIPTORS)
        if len(descriptors) < NUM_DESCRIPTORS:
            os._exit(ExitCode.OK)  # the agent is gone, or wants no more
        if (answer := _fork_worker(descriptors)) is None:
            line.detach()  # it was closed with all that a worker has not
            return
        for descriptor in descriptors:
            os.close(descriptor)
        _answer(line, answer)


def _answer(line: socket.socket, message: dict[str, Any]) -> None:
    try:
        line.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        os._exit(ExitCode.OK)  # the agent is gone


def _hide_hook(folder: str, python_path: str | None) -> None:
    """Let modules be found as if this folder had not been on the path."""
    del os.environ[ORDER]
    if python_path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environb[b"PYTHONPATH"] = as_bytes(python_path)
    sys.path.remove(folder)
    sys.path_importer_cache.pop(folder, None)


def _check_streams(line: int) -> None:
    """Raise `_UnfitError` when one of the standard streams is closed, or is this line of ours by its number."""
    if closed := [name for name, number, _ in _STANDARD if getattr(sys, name) is None or number == line]:
        raise _UnfitError(f"{closed[0]} of the agent is closed")


def check_fit_to_fork(line: int, loaded_by_python: Collection[str]) -> None:
    """Raise `_UnfitError` for what a forked worker would have that a fresh process has not, or the other way round."""
    # A trial: threads that end themselves before a fork, as those of OpenBLAS, are none that could be lost.
    if (trial := os.fork()) == 0:
        os._exit(ExitCode.OK)
    os.waitpid(trial, 0)
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        raise _UnfitError(f"loading its modules left {num_threads - 1} threads running")
    is_open = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    if strange := sorted(is_open - {0, 1, 2, line}):
        raise _UnfitError(f"loading its modules left {os.readlink(f'/proc/self/fd/{strange[0]}')} open")
    if _has_children():
        raise _UnfitError("loading its modules left a process running")
    if sys.gettrace() is not None or sys.getprofile() is not None or _is_monitored():
        raise _UnfitError("a tracer or a profiler is at work")
    if name := _shadowed_by(_folder_of_script(), set(sys.modules).difference(loaded_by_python)):
        raise _UnfitError(f"{name!r}, which was loaded, would be another module beside the script")


def _is_monitored() -> bool:
    """Whether a tool watches what is run, as Python 3.12 and later let it."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return monitoring is not None and any(monitoring.get_tool(tool) is not None for tool in range(6))


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _folder_of_script() -> str:
    """The folder that Python puts in front of its path: that of the script, or where ``-m`` is called."""
    script = sys.orig_argv[2]
    return os.getcwd() if script == "-m" else os.path.dirname(os.path.realpath(script))


def _shadowed_by(folder: str, loaded: Collection[str]) -> str | None:
    """A top-level module of these that an import with this folder in front of the path would find there instead."""
    tops = {name.partition(".")[0] for name in loaded}
    suffixes = tuple(all_suffixes())
    for entry in os.scandir(folder):
        name = entry.name.partition(".")[0]
        if name not in tops or not (entry.name.endswith(suffixes) or os.path.exists(f"{entry.path}/__init__.py")):
            continue
        found = getattr(sys.modules.get(name), "__file__", None)
        if found is None or not os.path.realpath(found).startswith(os.path.realpath(entry.path)):
            return name
    return None


# --- forking ---


def _fork_worker(descriptors: list[int]) -> dict[str, Any] | None:
    """Fork a worker whose parent is the nearest subreaper, the agent. None in the worker, set up; else the answer."""
    hears, tells = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            worker = os.fork()
        except OSError as error:
            os.write(tells, f"forking: {error}".encode())
            os._exit(ExitCode.FAILED)
        if worker == 0:
            os.close(tells)
            _become_worker(descriptors)
            return None
        os.write(tells, str(worker).encode())
        os._exit(ExitCode.OK)
    os.close(tells)
    with open(hears, "rb") as pipe:
        # Its own end is not enough to know that its child has been handed on.
        os.waitpid(between, 0)
        told = pipe.read(1000).decode()
    return {"pid": int(told)} if told.isdecimal() else {"failed": told or "forking failed"}


def _become_worker(descriptors: list[int]) -> None:
    """Wait for the word, then be as Python is when it is about to run the script."""
    request, *streams, go = descriptors
    if not os.read(go, 1):
        os._exit(ExitCode.OK)
    os.setsid()
    asked = json.loads(os.pread(request, os.fstat(request).st_size, 0))
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    # All that was open was checked: it is the agent's line, and what came through it.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environb.clear()
    os.environb.update({as_bytes(name): as_bytes(value) for name, value in asked["environment"].items()})
    ignore_signals(asked["ignored_signals"])
    for name, number, mode in _STANDARD:
        stream = _open_stream(name, number, mode)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    draw_anew()
    _thaw_at_end()


def _thaw_at_end() -> None:
    """Let go of what was loaded when the script has ended, as Python does: libraries complain of what is kept.

    Not by `atexit`, which tells a script how much is registered there.
    """
    if "threading" in sys.modules:
        threading: Any = sys.modules["threading"]
        threading._register_atexit(gc.unfreeze)
    else:
        gc.unfreeze()


def _open_stream(name: str, number: int, mode: str) -> TextIO:
    """A standard stream, as Python makes it at its start under ``-u``: files, pipes and terminals are not alike."""
    was: TextIO = getattr(sys, f"__{name}__")
    is_written = mode == "wb"
    buffer = open(number, mode, buffering=0 if is_written else -1, closefd=False)  # noqa: SIM115
    raw: Any = buffer if is_written else buffer.raw  # type: ignore[attr-defined]
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(buffer, was.encoding, was.errors, newline="\n", write_through=True)
    stream.mode = mode[0]  # type: ignore[misc]
    return stream


def draw_anew() -> None:
    """Give this process random numbers, a time and an id of its own, where a module takes them when it is loaded.

    `random` does it by itself at every fork; `tempfile`, `uuid` and `secrets` draw when they are asked.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "logging" in sys.modules:
        logging: Any = sys.modules["logging"]
        # Records tell people how long after this they were made; since Python 3.13 it is in nanoseconds.
        now_ns = time.time_ns()
        logging._startTime = now_ns if isinstance(logging._startTime, int) else now_ns / 1e9
    if "threading" in sys.modules:
        main: Any = sys.modules["threading"].main_thread()
        main._native_id = os.getpid()
