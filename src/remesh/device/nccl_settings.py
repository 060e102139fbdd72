"""Environment settings of torch for a process that outlives its NCCL groups.

torch is made for processes that end when a neighbour does, and some of its threads end them. They are set before the
first group is made. What the user has not set is set; what the user has set against it is refused, by name:

- ``TORCH_NCCL_ASYNC_ERROR_HANDLING``. By 1 and 3, its default, the watchdog ends the process at the first error.
- ``TORCH_NCCL_DUMP_ON_TIMEOUT``, on by default. The first error leaves a key in the store of the job. Every process
  that starts later, to replace the lost one, finds it, and its monitor ends it ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``
  later, 8 minutes by default. Without the monitor (``TORCH_NCCL_ENABLE_MONITORING=0``) the key does no harm.
- ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC``, 15 s by default. Whether anything is dumped or not, the watchdog waits four
  times as long between an error and the abort: a hung collective would last a minute longer than the group's timeout.

The rest may be as it is. The flight recorder (``TORCH_NCCL_TRACE_BUFFER_SIZE``) goes on recording, and can be read when
asked. ``TORCH_NCCL_BLOCKING_WAIT`` lets the host wait for each operation: right, and slow. By
``TORCH_NCCL_RETHROW_CUDA_ERRORS``, on by default, a process whose device is lost ends, and is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Final

_HANDLING: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""The name, and the one that it had before."""
_DUMPS: Final = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_MONITORS: Final = "TORCH_NCCL_ENABLE_MONITORING"
_WAITS: Final = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_OUTLIVES: Final = {"2": "abort the group and go on", "0": "leave it to the program"}
_OFF: Final = ("0", "n", "no", "f", "false", "off")


def settings_here(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What this process has of the settings that matter here."""
    return {name: environ[name] for name in (*_HANDLING, _DUMPS, _MONITORS, _WAITS) if name in environ}


def let_groups_be_aborted(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let this process outlive the errors of groups that it makes from now on, unless the user has said otherwise."""
    if not any(name in environ for name in _HANDLING):
        environ[_HANDLING[0]] = "2"
    environ.setdefault(_DUMPS, "0")
    environ.setdefault(_WAITS, "0")


def why_it_would_end(settings: Mapping[str, str]) -> str | None:
    """Which setting lets a process end when a neighbour does, and what it should be; None if none does."""
    handling = next((name for name in _HANDLING if name in settings), None)
    if handling is not None and settings[handling] not in _OUTLIVES:
        allowed = " or ".join(f"{value} ({what})" for value, what in _OUTLIVES.items())
        return (
            f"{handling} is {settings[handling]!r}, by which the process ends when a neighbour does, expected "
            f"{allowed} for a job that goes on; unset it"
        )
    if not _is_off(settings, _DUMPS) and not _is_off(settings, _MONITORS):
        found = settings.get(_DUMPS, "unset, which is on")
        return (
            f"{_DUMPS} is {found!r}, by which the processes that replace lost ones "
            f"are ended some minutes later, expected 0, or {_MONITORS}=0 beside it, for a job that goes on; unset it"
        )
    return None


def _is_off(settings: Mapping[str, str], name: str) -> bool:
    return settings.get(name, "1").lower() in _OFF
