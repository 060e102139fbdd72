"""Where do processes of several jobs meet? At a store of one of them, which stays for the meetings that follow."""

from __future__ import annotations

import torch.distributed as dist

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


def _answers(store: dist.TCPStore) -> bool:
    try:
        store.num_keys()
    except RuntimeError:  # of which torch's errors of the network are a kind
        return False
    return True
