"""Server with one thread for each connection, and a limit on the number of threads.

For snapshot transfers and metrics scrapers. A connection that arrives when all threads are taken is closed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

from remesh.foundation.threads import make_thread


class Reception:
    """A context manager: entered, it takes connections; left, it listens no more.

    ``talk`` is called in a thread with each connection, which is closed when it returns or raises OSError.
    """

    def __init__(
        self, listener: socket.socket, talk: Callable[[socket.socket], None], *, name: str, max_callers: int
    ) -> None:
        self._listener = listener
        self._talk = talk
        self._name = name
        self._free = threading.Semaphore(max_callers)
        self._ended = threading.Event()
        self._thread = make_thread(name, self._serve, daemon=True)
        self.port: int = listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # Closing alone would leave the thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # The caller is gone again, or there are no descriptors left: look again in a moment.
                if self._ended.wait(0.05):
                    return
                continue
            if self._free.acquire(blocking=False):
                make_thread(f"{self._name}-talk", self._converse, connection, daemon=True).start()
            else:
                connection.close()

    def _converse(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                self._talk(connection)
        finally:
            self._free.release()
