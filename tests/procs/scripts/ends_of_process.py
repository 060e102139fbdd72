"""Ends of a process with a save under way: ``ends_of_process.py FOLDER ENTRY`` prints the ways that lost nothing.

Each case is a child, forked before any save, which leaves this script as its way says. The save is under way when that
happens: writing waits until the main thread has come to its end.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import remesh
from remesh import Checkpoints, dist_checkpointing
from remesh.checkpoint.plain import entities_of
from remesh.checkpoint.run import writer
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from remesh.foundation.errors import ForkError
from remesh.foundation.thread_pool import before_end
from remesh.integrations import dcp as plug
from remesh.integrations.dcp import DcpWriter

_LONGEST_S = 100
_MAIN_ENDS = threading.Event()


def _state() -> dict[str, Any]:
    return {"w": torch.arange(1000.0)}


def save(folder: str) -> None:
    remesh.save(_state(), folder, background=True)


def save_by_manager(folder: str) -> None:
    checkpoints = Checkpoints(Path(folder).parent, keep=1, background=True)
    checkpoints.save(int(Path(folder).name.removeprefix("step-")), _state())


def save_by_queue(folder: str, worker: str = "thread") -> None:
    Path(folder).mkdir()
    request = dist_checkpointing.save(entities_of(_state()), folder, async_sharded_save=True)
    assert request is not None
    AsyncCallsQueue(worker=worker).schedule_async_request(request)


def save_by_worker(folder: str) -> None:
    save_by_queue(folder, "process")


def save_by_torch(folder: str) -> None:
    dcp.async_save(_state(), storage_writer=DcpWriter(folder))


def leave(folder: str, act: Callable[[str], None]) -> None:
    act(folder)


def leave_by_exit(folder: str, act: Callable[[str], None]) -> None:
    act(folder)
    sys.exit(3)


def leave_by_error(folder: str, act: Callable[[str], None]) -> None:
    act(folder)
    sys.excepthook = lambda *_: None
    raise KeyError("an error of the program")


def leave_by_signal(folder: str, act: Callable[[str], None]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    act(folder)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LONGEST_S)


def leave_for_another_folder(folder: str, act: Callable[[str], None]) -> None:
    act(folder)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")


def leave_to_atexit(folder: str, act: Callable[[str], None]) -> None:
    atexit.register(act, folder)


def leave_to_another_thread(folder: str, act: Callable[[str], None]) -> None:
    """To one that saves when the main thread has ended."""

    def later() -> None:
        threading.main_thread().join()
        act(folder)

    threading.Thread(target=later).start()


def leave_a_daemon(folder: str, act: Callable[[str], None]) -> None:
    daemon = threading.Thread(target=act, args=(folder,), daemon=True)
    daemon.start()
    daemon.join()


def leave_blocking_a_signal(folder: str, act: Callable[[str], None]) -> None:
    """A program blocks a signal to wait for it: no thread that saves may take it."""
    act(folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1


def leave_a_fork(folder: str, act: Callable[[str], None]) -> None:
    """The child has no part in the save, ends before it is made, and saves by itself."""
    act(folder)
    mine = remesh.save(_state(), "of-both", background=True)
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        mine.result()
        return
    try:
        mine.result()
    except ForkError:
        remesh.save(_state(), "of-child", background=True)
    else:
        raise AssertionError("the child was given the save of its parent")


WAYS = (
    *(leave, leave_by_exit, leave_by_error, leave_by_signal, leave_for_another_folder, leave_to_atexit),
    *(leave_to_another_thread, leave_a_daemon, leave_blocking_a_signal, leave_a_fork),
)


def _hold_writes() -> None:
    before_end(_MAIN_ENDS.set)
    for module in (writer, plug):
        write = module.write_data_file

        def held(*args: Any, write: Callable[..., Any] = write) -> Any:
            assert _MAIN_ENDS.wait(_LONGEST_S)
            return write(*args)

        module.write_data_file = held  # type: ignore[attr-defined]


def main() -> None:
    root = Path(sys.argv[1])
    names: list[str] = []
    entry: Callable[[str], None] = globals()[sys.argv[2]]
    # torch makes its thread by an executor, which takes no work at the end, and says so; and the thread takes signals.
    not_torchs = (leave_to_atexit, leave_to_another_thread, leave_blocking_a_signal)
    ways = [way for way in WAYS if entry is not save_by_torch or way not in not_torchs]
    for number, way in enumerate(ways):
        name = way.__name__
        (root / name).mkdir()
        child = os.fork()
        if not child:
            signal.alarm(_LONGEST_S)
            os.chdir(root / name)
            # Called last: what Python takes apart after that takes long, and saves nothing.
            atexit.register(os._exit, 0)
            if way is not leave_a_fork:
                _hold_writes()
            try:
                way(f"step-{number:08}", entry)
            except AssertionError as raised:
                os.write(2, f"{name}: {raised}".encode())
                os._exit(1)
            return
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
        names.append(name)
    for number, (name, way) in enumerate(zip(names, ways, strict=True)):
        found = {"w": torch.zeros(1000)}
        folders = [f"step-{number:08}", *(["of-both", "of-child"] if way is leave_a_fork else [])]
        for folder in folders:
            remesh.load(found, root / name / folder)
            assert torch.equal(found["w"], _state()["w"])
    print(json.dumps(names))


main()
