"""Handle on an asynchronous transfer that a thread carries out.

Planning and agreement are collective and happen before the handle exists, in the caller's thread, so they keep their
place among the caller's other collectives. What the thread does is point-to-point messages under a tag of its own:
the caller may use the group meanwhile. The tensors belong to the run until it is done: nothing that is given may be
changed, nothing that is taken may be read.

Over NCCL messages have no tags, and operations of a communicator must be queued in one order on all ranks, which two
threads have not. There a run is over when it was started.
"""

from __future__ import annotations

import threading

from remesh.device.streams import CallersStreams
from remesh.foundation.threads import make_thread
from remesh.foundation.torch_private import never_compiled
from remesh.resharding.running.run import BoundTransfer, Moved


@never_compiled
class Handle:
    """A run in progress; wait with ``result()``."""

    def __init__(self, job: BoundTransfer, tag: int) -> None:
        self._job = job
        self._tag = tag
        self._done = threading.Event()
        self._moved: Moved | None = None
        self._error: BaseException | None = None
        self._streams = CallersStreams()
        self._thread = make_thread("reshard", self._work, daemon=True)

    def start(self) -> Handle:
        """Begin; the handle itself."""
        if self._job.is_queued:
            self._work()
        else:
            self._thread.start()
        return self

    @property
    def is_done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the run has ended, at most for the timeout; whether it has."""
        return self._done.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> Moved:
        """What was moved, once the run has ended.

        Raises the error that ended it (`PeerError` when a rank died), or TimeoutError when it takes longer than
        ``timeout_s``; then it goes on, and may be waited for again.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(
                f"waiting for a reshard of {len(self._job.transfer.moves)} tensors: not done after {timeout_s} s; wait "
                "longer, or destroy the process group to end it"
            )
        if self._error is not None:
            raise self._error
        assert self._moved is not None
        return self._moved

    def _work(self) -> None:
        try:
            with self._streams.followed():
                self._moved = self._job.run(self._tag)
        except BaseException as error:  # raised by ``result``
            self._error = error
        finally:
            self._done.set()
