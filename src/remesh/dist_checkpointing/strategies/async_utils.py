"""Names of `remesh.checkpoint.background` under the module that users of Megatron Core import."""

from __future__ import annotations

import logging
import os

from remesh.checkpoint.background.queue import AsyncCallsQueue as AsyncCallsQueue
from remesh.checkpoint.background.writers import (
    AsyncCaller as AsyncCaller,
    AsyncRequest as AsyncRequest,
    PersistentAsyncCaller as PersistentAsyncCaller,
    Progress as Progress,
    TemporalAsyncCaller as TemporalAsyncCaller,
    ThreadAsyncCaller as ThreadAsyncCaller,
)
from remesh.foundation.collector import collector_at_rest

logger = logging.getLogger(__name__)
_disable_gc = collector_at_rest


def _set_process_qos(cpu_priority: int | None, io_priority: int | None = None) -> None:
    """Raise the niceness of this process to ``cpu_priority``; ``io_priority`` changes nothing.

    A niceness that is as high already stays, and what the system does not allow is logged.
    """
    try:
        os.nice(max(0, (cpu_priority or 0) - os.nice(0)))
    except OSError as raised:
        logger.warning("the niceness of process %s stays: %s", os.getpid(), raised)
