"""What does a rank on a testbed do? The bodies of the processes behind :class:`remesh.testbed.bed.Testbed`.

A rank enters its host, joins a gloo group over the host's interface, calls one function, answers, and ends. The store
of the groups lives with the switches, where no killed rank and no other host's cut link reaches it.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from remesh.testbed.inside import Door, enter_host
from remesh.testbed.rank_task import Answer, Task

_STORE_TIMEOUT = timedelta(seconds=60)


def host_store(door: Door, address: str, port: int, log_path: str, pipe: Connection) -> None:
    """Host a key-value store in a namespace, tell that it listens, live until the other end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _send_output_to(log_path)
    enter_host(door)
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    pipe.send_bytes(b"listening")
    try:
        pipe.recv_bytes()
    except EOFError:
        del store


def run_rank(task: Task, pipe: Connection) -> None:
    """Do the task and answer through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _send_output_to(task.log_path)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=False)
    enter_host(task.door)
    threading.Thread(target=_end_with_owner, name="end-with-owner", daemon=True).start()
    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps(_answer(task)))


def _answer(task: Task) -> Answer:
    """Whatever goes wrong becomes text, because not every exception survives pickling."""
    try:
        function, args = _open(task.call)
        client = dist.TCPStore(task.store_address, task.store_port, is_master=False, timeout=_STORE_TIMEOUT)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(task.store_prefix, client),
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.group_timeout_s),
        )
        try:
            return Answer(pickle.dumps(function(*args)))
        finally:
            # The function may have left its groups itself.
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as error:
        return Answer(None, "".join(traceback.format_exception(error)).rstrip())


def _open(call: bytes) -> tuple[Callable[..., object], tuple[object, ...]]:
    function, args = pickle.loads(call)
    return function, args


def _end_with_owner() -> None:
    """End with the process that owns the bed, however it went, even while a call hangs."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)


def _send_output_to(log_path: str) -> None:
    """Both output streams, of Python and of libraries, into one file in order of writing."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        os.dup2(log, descriptor)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    os.close(log)
