"""Worker processes behind :class:`remesh.testbed.pool.RankPool`.

A worker enters its host if it has an entry, then serves one call after the other: it joins a fresh gloo group, reports
that, calls a module-level function, leaves the group and answers with the pickled result or with the text of what went
wrong. What the function changed of its process is put back: the next call is another test's. It ends when the pool's
end of the pipe closes. A second kind of process hosts the key-value store, so that the store outlives every worker, and
takes the pool's folder away when the pool is gone, however it went.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

from remesh.foundation.threads import make_thread
from remesh.testbed.rank_messages import JOINED, RankAnswer, RankCall, RankEntry

_MAX_LOCALS_CHARS = 200
_STORE_TIMEOUT = timedelta(minutes=10)
"""Long: the pool decides how long ranks may take to come up."""


def host_store(pipe: Connection, entry: RankEntry | None, address: str, folder: str) -> None:
    """Host a key-value store, send its port, live until the other end of the pipe closes; then remove the folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _send_output_to(f"{folder}/store.log")
    if entry is not None:
        entry.enter()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    pipe.send_bytes(pickle.dumps(store.port))
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()
    shutil.rmtree(folder, ignore_errors=True)


def serve_calls(pipe: Connection, entry: RankEntry | None, log_path: str) -> None:
    """Answer calls from the pipe until its other end closes. Output and stacks go to the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _send_output_to(log_path)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=False)
    if entry is not None:
        entry.enter()  # before the first thread, which would stay outside
    make_thread("end-with-owner", _end_with_owner, daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module=r"remesh(\.|$)")
    while True:
        try:
            call: RankCall = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        with _surroundings_kept():
            answer = _answer(call, pipe)
        pipe.send_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def _surroundings_kept() -> Iterator[None]:
    """Put back the variables, the working folder, the default type of numbers and the number of threads."""
    variables, folder = dict(os.environ), os.getcwd()
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    if os.environ != variables:
        os.environ.clear()
        os.environ.update(variables)
    os.chdir(folder)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(num_threads)


def _answer(call: RankCall, pipe: Connection) -> RankAnswer:
    """Perform one call; whatever goes wrong becomes text, because not every exception survives pickling."""
    sys.path[:] = call.sys_path
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        function = call.function.find()
        _join_group(call)
        pipe.send_bytes(JOINED)
        try:
            result = pickle.dumps(function(*pickle.loads(call.args)))
        finally:
            # The function may have left its groups itself.
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException as error:
        return RankAnswer(None, _describe(error), time.monotonic())
    return RankAnswer(result, "", time.monotonic())


def _end_with_owner() -> None:
    """End with the process that owns the pool, however it went, even while a call hangs."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)


def _join_group(call: RankCall) -> None:
    client = dist.TCPStore(*call.store, is_master=False, timeout=_STORE_TIMEOUT)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(call.store_prefix, client),
        rank=call.rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.group_timeout_s),
    )
    # A rank may be connected before its peers are; if its function is done at once and its group is closed, they
    # would fail to connect.
    dist.barrier()


def _describe(error: BaseException) -> str:
    """The traceback, with the local variables of its innermost frame (asserts are bare in workers)."""
    lines = ["".join(traceback.format_exception(error)).rstrip()]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames:
        lines.append(f"Locals of {frames[-1].f_code.co_name}:")
        lines += [f"  {name} = {_short_repr(value)}" for name, value in frames[-1].f_locals.items()]
    return "\n".join(lines)


def _short_repr(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:
        text = f"<repr failed: {type(error).__name__}>"
    return text if len(text) <= _MAX_LOCALS_CHARS else text[:_MAX_LOCALS_CHARS] + "..."


def _send_output_to(log_path: str) -> None:
    """Send both output streams, of Python and of libraries, to one file in the order of writing."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        os.dup2(log, descriptor)
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    os.close(log)
