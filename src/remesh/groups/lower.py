"""Lower half on torch.distributed: process groups that can be shed in bounded time and grown again.

Shedding. When a peer dies, only ranks with a direct connection to it notice; the others sit in their collective until
the group's timeout, and gloo's ``abort`` wakes no blocked thread. So a rank that learns of the death shuts down the
sockets that the groups opened: every blocked operation then ends at once with a connection error. The sockets are known
exactly: those that appeared while the groups were made, and that gloo's own threads wait on (by descriptor *and* inode,
so that a descriptor reused by the program since is left alone).

NCCL communicators are aborted instead, which their members must outlive (`remesh.device.nccl`). Aborts may take as long
as they like: they have threads of their own, and the rank that sheds waits for them, for a limited time. Connections of
the control group are cut before: a rank that has lost a collective on its device can no longer vote as if it had not. A
collective that was aborted raises nowhere, so members ask before they vote (`LowerHalf.check_end`).

torch finds groups by name, and names count up from the start: groups that are grown again in the same order have the
names of those before. So a DeviceMesh that the program holds is good again on the new groups, and one that was made on
groups that only pretend is good on real ones.

    grow ──> [ready] ──> sever (any thread: wakes everyone inside a collective) ──> shed (main thread) ──> grow ...
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from remesh.device.nccl import agree_on_members, member_here
from remesh.device.nccl_settings import let_groups_be_aborted
from remesh.foundation.errors import ConfigError, PeerError
from remesh.foundation.threads import make_thread
from remesh.foundation.torch_private import (
    FakeProcessGroup,
    abort_nccl,
    all_groups,
    is_known_backend,
    name_groups_from_the_start,
    nccl_error,
    num_groups_named,
)
from remesh.groups.aborts import Aborts
from remesh.groups.gloo_sockets import Socket, Surroundings, cut_connections, look_around, open_sockets, pick_gloos

_POLL_S = 0.05
PRETENCE = "pretence"
"""Name of the backend whose groups move nothing."""
_pretences: list[Any] = []
"""Of the groups that pretend now, all of them one object: torch asks for them by the backend's name alone."""


class LowerHalf:
    """The process groups of one generation: made by :meth:`grow`, broken by :meth:`sever`, dropped by :meth:`shed`.

    ``grow`` and ``shed`` are called by the main thread of every member and block on the others (bounded by
    ``timeout_s``); ``sever`` never blocks and may be called from any thread.
    """

    def __init__(self, backend: str, device_type: str, timeout_s: float) -> None:
        self._backend = backend
        self._device_type = device_type
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._before: Surroundings | None = None
        """Not None while groups are being made."""
        self._sockets: frozenset[Socket] = frozenset()
        self._severed = False
        self._abort: Aborts | None = None
        """Of communicators on devices; None until they are severed."""
        self.mesh: DeviceMesh | None = None
        self.control: dist.ProcessGroup | None = None
        """A gloo group of all members for votes, apart from the groups that user code posts collectives on."""
        self._num_groups = 0
        self._wake: Callable[[], None] | None = None
        """Ends waits on the store that groups are being made over."""

    def grow(
        self, store: dist.Store, rank: int, axes: Mapping[str, int], *, wake: Callable[[], None] | None = None
    ) -> None:
        """Make the world group, the mesh and its axis groups over ``store``, whose keys must be fresh.

        ``wake`` makes every wait on the store end with an error, from any thread: called when a member is lost.
        """
        world_size = math.prod(axes.values())
        with self._lock:
            self._before, self._wake = look_around(), wake
            severed = self._severed
        if severed:
            raise self._lost_meanwhile(rank, axes)
        self._see_one_backend(store, rank)
        if self._backend == "nccl":
            let_groups_be_aborted()
            agree_on_members(store, rank, world_size, member_here(None, must_outlive=True), self._timeout)
        dist.init_process_group(self._backend, store=store, rank=rank, world_size=world_size, timeout=self._timeout)
        self._make_groups("gloo", axes)
        assert self.mesh is not None
        for group in self.mesh.get_all_groups():
            # The mesh makes its groups with torch's default of 30 minutes.
            group.set_timeout(self._timeout)
        with self._lock:
            self._sockets = pick_gloos(open_sockets(), self._before)
            self._before = self._wake = None
            severed = self._severed
        if severed:
            self.sever()
            raise self._lost_meanwhile(rank, axes)

    def pretend(self, rank: int, axes: Mapping[str, int]) -> None:
        """Groups of the same names that move nothing and wait for no rank, to build a model on before :meth:`grow`."""
        world_size = math.prod(axes.values())
        if not is_known_backend(PRETENCE):
            devices = ["cpu", "cuda"]
            dist.Backend.register_backend(PRETENCE, _make_pretending_group, extended_api=True, devices=devices)
        _pretences.append(FakeProcessGroup.Options())
        dist.init_process_group(PRETENCE, store=dist.HashStore(), rank=rank, world_size=world_size)
        self._make_groups(PRETENCE, axes)

    def _make_groups(self, backend: str, axes: Mapping[str, int]) -> None:
        self.control = dist.new_group(backend=backend, timeout=self._timeout)
        self.mesh = init_device_mesh(self._device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self._num_groups = num_groups_named()

    @property
    def has_own_groups(self) -> bool:
        """Whether the program made groups besides; those would not come back under their names."""
        return num_groups_named() != self._num_groups

    def sever(self) -> None:
        """Cut every connection of the groups, so that all operations on them end with an error now.

        In :meth:`grow` it ends waits for members that never come; before it, it makes that fail until :meth:`shed`.
        """
        with self._lock:
            is_first, self._severed = not self._severed, True
            before = self._before
            sockets = self._sockets if before is None else pick_gloos(open_sockets(), before)
            self._sockets, wake = frozenset(), self._wake
        cut_connections(sockets)
        if before is not None and is_first:
            make_thread("sever", self._keep_cutting, before, daemon=True).start()
        if wake is not None:
            wake()
        if self._backend == "nccl":
            # The communicators' kernels spin on the device; only abort ends them.
            with self._lock:
                self._abort = self._abort or Aborts([partial(abort_nccl, group) for group in all_groups()])

    def _keep_cutting(self, before: Surroundings) -> None:
        """Cut what groups that are still being made open from now on, until they are made or given up."""
        while True:
            time.sleep(_POLL_S)
            with self._lock:
                if self._before is not before:
                    return
                sockets = pick_gloos(open_sockets(), before)
            cut_connections(sockets)

    def check_end(self) -> None:
        """Wait for what this rank has queued on its device; without a device returns at once. No communication.

        `PeerError` when an operation of any of its groups was given up: what it was to bring is not there.
        """
        if self._backend != "nccl":
            return
        torch.cuda.current_stream().synchronize()
        found = [error for group in all_groups() if (error := nccl_error(group)) is not None]
        with self._lock:
            found += ["the groups were severed"] * self._severed
        if found:
            raise PeerError(
                f"waiting for the device: expected every collective to be done, found {found[0]}: one was given up, "
                "and what it was to bring is undefined; meet again in new groups"
            )

    def shed(self) -> None:
        """Drop the groups; the next :meth:`grow` starts from nothing.

        `PeerError` when communicators on the device cannot be aborted: this process is of no more use.
        """
        if self._abort is not None:
            self._abort.wait(self._timeout)
            self._abort = None
        self.mesh = None
        self.control = None
        while _pretences:
            # A rank that kept such a group by itself would go on alone, without an error.
            _pretences.pop().error_on_collective = True
        if dist.is_initialized():
            groups = all_groups()
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
            if self._backend == "gloo":
                # Each waits up to 10 ms for its loop, and a rank that sheds groups wants others. The interpreter waits
                # for this thread: one that ended within gloo would abort the process.
                make_thread("shed", groups.clear, daemon=False).start()
        # torch counts groups to name them, and takes back the count only when the world group is destroyed. A member
        # whose world group could not even be made would wait under another name than the others, next time.
        name_groups_from_the_start()
        with self._lock:
            self._before, self._sockets, self._severed, self._wake = None, frozenset(), False, None

    def _see_one_backend(self, store: dist.Store, rank: int) -> None:
        """Raise `ConfigError` when this rank has another backend than the one that came first. Waits for no rank."""
        first = store.compare_set("remesh-backend", "", self._backend).decode()
        if first != self._backend:
            raise ConfigError(
                f"forming groups: rank {rank} is to talk over {self._backend}, others over {first}, expected one "
                "backend; let all workers have a GPU, or none (CUDA_VISIBLE_DEVICES= hides them)"
            )

    def _lost_meanwhile(self, rank: int, axes: Mapping[str, int]) -> PeerError:
        return PeerError(f"forming mesh {dict(axes)} as rank {rank}: a member was lost meanwhile; all meet again")


def _make_pretending_group(common: Any, _own: Any) -> Any:
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, _pretences[-1])
