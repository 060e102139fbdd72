"""Fake NCCL groups: groups that call themselves so, on the memory of the host, carried by gloo.

They have what NCCL has and gloo has not: operations have no tags, a wait for one returns whatever became of it, and
only the group, when asked, reports that an operation was aborted. What an aborted operation leaves behind is made as
bad as it can be: what the one before it had left there. A batch that raises leaves its group of operations open in the
thread, as torch does: what that thread queues later, on whatever group, never starts, without an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from remesh.comm import gather
from remesh.device.nccl import NcclMember

_NAME = "believed"
_PATIENCE = timedelta(seconds=30)


class _OpenGroups(threading.local):
    """The groups of operations that a thread has opened and not closed."""

    num = 0
    is_in_batch = False


_open = _OpenGroups()


def _loses_nothing(name: str, number: int) -> bool:
    return False


class BelievedGroup(dist.ProcessGroup):
    """One rank's end of a group. ``loses`` says of each operation, by its name and number, whether it is given up."""

    loses: ClassVar[Callable[[str, int], bool]] = staticmethod(_loses_nothing)

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # stubs lack this one
        self._carrier: Any = dist.ProcessGroupGloo(store, rank, size, _PATIENCE)  # type: ignore[attr-defined]
        self.error = "SUCCESS"
        self.names: list[str] = []
        """Of the operations, in the order in which they were queued."""
        self.peers: set[int] = set()
        """With whom messages were queued."""
        self._last: dict[int, torch.Tensor] = {}
        """What was received last, by size."""

    # --- what torch and Remesh ask of a group, and of what it has for devices ---

    @property
    def bound_device_id(self) -> torch.device:
        return torch.device("cpu")

    def _set_sequence_number_for_group(self) -> None:
        """There is none."""

    def _get_backend(self, device: torch.device) -> BelievedGroup:
        return self

    def getBackendName(self) -> str:
        return _NAME

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.error)

    # --- operations ---

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> _Work:
        self.peers.add(peer)
        return self._queue("send", [], lambda: self._carrier.send(tensors, peer, 0))

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> _Work:
        self.peers.add(peer)
        return self._queue("recv", tensors, lambda: self._carrier.recv(tensors, peer, 0))

    def allgather(self, into: Sequence[Sequence[torch.Tensor]], mine: Sequence[torch.Tensor], options: Any) -> _Work:
        return self._queue("allgather", into[0], lambda: self._carrier.allgather(into, mine, options))

    def _queue(self, name: str, into: Sequence[torch.Tensor], begin: Callable[[], Any]) -> _Work:
        if self._carrier is None:
            raise dist.DistBackendError("NCCL communicator was aborted")
        self.names.append(name)
        if _open.num > _open.is_in_batch:
            return _Work(self, into, None)
        if type(self).loses(name, self.names.count(name)):
            self.give_up(into)
            return _Work(self, into, None)
        return _Work(self, into, begin())

    def give_up(self, into: Sequence[torch.Tensor]) -> None:
        """As torch's watchdog does, some time after the group's timeout; neighbours that wait for this rank learn of
        it."""
        self.error, self._carrier = "TIMEOUT", None
        for tensor in into:
            if tensor.nbytes in self._last:
                tensor.view(-1).view(torch.uint8).copy_(self._last[tensor.nbytes])

    def keep(self, into: Sequence[torch.Tensor]) -> None:
        for tensor in into:
            self._last[tensor.nbytes] = tensor.reshape(-1).view(torch.uint8).clone()


class _Work:
    def __init__(self, group: BelievedGroup, into: Sequence[torch.Tensor], carried: Any) -> None:
        self._group, self._into, self._carried = group, into, carried

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._carried is not None:
            try:
                self._carried.wait()
            except RuntimeError:  # a neighbour is gone, or came too late
                self._group.give_up(self._into)
            else:
                self._group.keep(self._into)
        return True


def _batched(really: Callable[[list[dist.P2POp]], list[dist.Work]], ops: list[dist.P2POp]) -> list[dist.Work]:
    _open.num += 1
    _open.is_in_batch = True
    try:
        works = really(ops)
    finally:
        _open.is_in_batch = False
    _open.num -= 1  # not after an error: torch ends a group only when all of it was queued
    return works


@contextlib.contextmanager
def believed_group(loses: Callable[[str, int], bool] = _loses_nothing) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks; every rank of the default group calls this. ``loses`` is of this rank alone."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, BelievedGroup, devices=["cpu"])
    real = dist.get_backend_config
    here = NcclMember("host", f"GPU-{dist.get_rank()}", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BelievedGroup, "loses", staticmethod(loses))
        group = dist.new_group(backend=_NAME)
        believes: Callable[[Any], str] = lambda one=None: "cuda:nccl" if one is group else real(one)  # noqa: E731
        patch.setattr(dist, "get_backend_config", believes)
        patch.setattr(dist, "batch_isend_irecv", partial(_batched, dist.batch_isend_irecv))
        patch.setattr(gather, "member_here", lambda device_id, **more: here)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
        assert isinstance(group, dist.ProcessGroup)
        yield group
