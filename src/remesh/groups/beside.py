"""Process groups across jobs: a torch group over a store, beside each job's default group.

torch makes groups of ranks of the default group, and trainers and engines have none in common. Here a group is made
over a store that all of them reach; its ranks are numbers of its own, the same on every process. It goes wherever
Remesh takes a ``group``, and so do several of them, one after the other, as members come and go.

    store = dist.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)
    group = join_beside(store, rank, size)
    remesh.reshard(give, take, group=group)
    leave_beside(group)
"""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from remesh.foundation.errors import PeerError
from remesh.foundation.torch_private import make_group, number_ranks

_NAME = "remesh/beside"


def join_beside(
    store: dist.Store, rank: int, size: int, *, meeting: str = "", timeout_s: float = 600.0, backend: str = "gloo"
) -> dist.ProcessGroup:
    """Meet ``size`` processes at a store; their group, in which this process is ``rank``.

    ``meeting`` is a name that no earlier meeting at this store had, where it serves several.

    Called by all of them; blocks until all have come. `PeerError` when a rank has not after ``timeout_s``. What
    else waits in the group waits no longer than that, either.
    """
    doing = f"meeting {size} processes beside the default group as rank {rank}"
    if not 0 <= rank < size:
        raise PeerError(f"{doing}: expected a rank from 0 to {size - 1}; give each process a different one")
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.PrefixStore(f"meeting {meeting}", store)
        store.set_timeout(timeout)
        if rank == 0:
            store.set(_NAME, f"{_NAME}/{uuid4().hex}")
        name = store.get(_NAME).decode()
        group: dist.ProcessGroup
        group, _ = make_group(size, rank, [], backend, store, group_name=name, timeout=timeout)
    except RuntimeError as raised:
        reason = str(raised).partition("\n")[0]
        raise PeerError(
            f"{doing}: not all ranks called this within {timeout_s:g} s ({reason}); start the missing processes"
        ) from raised
    number_ranks(group)
    return group


def leave_beside(group: dist.ProcessGroup) -> None:
    """Drop the group on this process. No communication."""
    dist.destroy_process_group(group)
