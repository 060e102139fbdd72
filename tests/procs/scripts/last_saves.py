"""The last background save of a rank of two: ``last_saves.py FOLDER RANK WAY``.

Nothing is written before the main thread has come to its end.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import remesh
from remesh import Checkpoints, dist_checkpointing
from remesh.checkpoint import plain
from remesh.checkpoint.plain import entities_of
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from remesh.foundation.thread_pool import before_end

_LONGEST_S = 100
_MAIN_ENDS = threading.Event()
_FOLDER, _RANK = Path(sys.argv[1]), int(sys.argv[2])


def _meet(name: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{_FOLDER}/{name}", rank=_RANK, world_size=2)


def _save(name: str = "step-00000000") -> Any:
    return remesh.save({"w": torch.arange(1000.0)}, _FOLDER / name, background=True)


def _fail() -> Any:
    def cannot(*args: Any, **options: Any) -> Any:
        raise OSError("no space is left")

    plain.write_part = cannot  # type: ignore[assignment]
    return _save()


def destroyed() -> None:
    _save()
    dist.destroy_process_group()


def destroyed_by_manager() -> None:
    Checkpoints(_FOLDER, keep=1, background=True).save(0, {"w": torch.arange(1000.0)})
    dist.destroy_process_group()


def destroyed_of_some() -> None:
    some = dist.new_group([1, 0])
    remesh.save({"w": torch.arange(1000.0)}, _FOLDER / "step-00000000", background=True, group=some)
    dist.destroy_process_group(some)
    dist.destroy_process_group()


def never_destroyed() -> None:
    _save()


def destroyed_at_exit() -> None:
    _save()
    atexit.register(dist.destroy_process_group)


def met_again() -> None:
    _save("before")
    dist.destroy_process_group()
    _meet("again")
    _save()
    dist.destroy_process_group()


def queued() -> None:
    (_FOLDER / "queued").mkdir(exist_ok=True)
    request = dist_checkpointing.save(entities_of({"w": torch.ones(9)}), _FOLDER / "queued", async_sharded_save=True)
    assert request is not None
    AsyncCallsQueue().schedule_async_request(request)
    dist.destroy_process_group()


def failed() -> None:
    _fail()


def failed_and_asked() -> None:
    _MAIN_ENDS.set()
    try:
        _fail().result()
    except OSError:
        print("asked")


def failed_and_made_up_for() -> None:
    write = plain.write_part
    _MAIN_ENDS.set()
    assert _fail().failure() is not None
    plain.write_part = write
    _save()


def _hold_writes() -> None:
    before_end(_MAIN_ENDS.set)
    write: Callable[..., Any] = plain.write_part

    def held(*args: Any, **options: Any) -> Any:
        assert _MAIN_ENDS.wait(_LONGEST_S)
        return write(*args, **options)

    plain.write_part = held


_meet("meeting")
_hold_writes()
globals()[sys.argv[3]]()
