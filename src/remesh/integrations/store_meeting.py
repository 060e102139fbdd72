"""Rendezvous of several jobs' processes, at a store of one of them.

The store stays, while one of the processes asks the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from remesh.foundation.errors import PeerError
from remesh.foundation.thread_pool import PooledExecutor

_STORES: dict[tuple[str, int, bool], dist.TCPStore] = {}


def store_at(address: str, port: int, *, is_server: bool) -> dist.TCPStore:
    """The store at a place, served by this process or another; an earlier connection is used while it answers.

    A store that has ended with its process is given up, and the process that serves at the place now is asked.
    """
    key = (address, port, is_server)
    if key not in _STORES or not _answers(_STORES[key]):
        _STORES.pop(key, None)
        _STORES[key] = dist.TCPStore(address, port, is_master=is_server, wait_for_workers=False)
    return _STORES[key]


def act_while_asking(act: Callable[[], Any], ask: Callable[[], Any]) -> None:
    """Call ``act``, and at the same time ``ask``, which has the other side do its part.

    What ``act`` raises on all ranks alike is raised here, too, whatever the other side's answer makes of it. Where
    a rank did not come, that answer has the reason, and is raised first.
    """
    asking = PooledExecutor(1, "ask")
    try:
        asked = asking.submit(ask)
        try:
            act()
        except PeerError:
            if asked.done():
                asked.result()
            raise
        asked.result()
    finally:
        asking.shutdown(wait=False)


def _answers(store: dist.TCPStore) -> bool:
    try:
        store.num_keys()
    except RuntimeError:  # of which torch's errors of the network are a kind
        return False
    return True
