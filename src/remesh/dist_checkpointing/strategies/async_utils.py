"""The names of `remesh.checkpoint.background` under the module that users of Megatron Core import."""

from remesh.checkpoint.background.queue import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    Progress,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
)

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "Progress",
    "TemporalAsyncCaller",
    "ThreadAsyncCaller",
]
