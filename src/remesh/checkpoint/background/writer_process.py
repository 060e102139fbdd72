"""Process that writes for another one. Started as ``-m remesh.checkpoint.background.writer_process DESCRIPTOR
NICENESS``.

It does one call after the other as they come through the socket of that descriptor, and ends when the other side closes
it. It holds no GPU and belongs to no process group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from remesh.checkpoint.background.worker_messages import Channel
from remesh.checkpoint.checkpoint_errors import CheckpointingException


def serve(channel: Channel) -> None:
    """Answer calls until the other end is closed: any number of ``("progress", bytes)``, then ``("done", value)``
    or ``("failed", error)``.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            channel.send(_answer_next(channel))


def _answer_next(channel: Channel) -> tuple[str, Any]:
    try:
        function, args, kwargs, tells = channel.receive()
    except (EOFError, OSError):
        raise
    except Exception as raised:  # a name that is not found here
        return "failed", _portable(raised)
    more = {"progress": lambda written_bytes: channel.send(("progress", written_bytes))} if tells else {}
    try:
        return "done", function(*args, **kwargs, **more)
    except Exception as raised:
        return "failed", _portable(raised)


def _portable(error: Exception) -> Exception:
    """The error as it can be sent: itself where its copy has the same text, else that text."""
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    return CheckpointingException(f"writing in the background: {type(error).__name__}: {error}")


def main() -> None:
    """Serve the socket that the first argument names."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this process takes none
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the training loop, which ends us by closing
    with contextlib.suppress(OSError):
        os.nice(int(sys.argv[2]))
    serve(Channel(Connection(int(sys.argv[1]))))


if __name__ == "__main__":
    main()
