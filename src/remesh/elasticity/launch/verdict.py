"""Outcome of an error that ended an agent: its category, which decides who must act."""

from __future__ import annotations

import errno
import traceback

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from remesh.elasticity.model.outcome import Category, Outcome
from remesh.foundation.errors import ConfigError, PeerError, StorageError

_ADDRESS_IN_USE = ("EADDRINUSE", "Address already in use", "address already in use")


def outcome_of_error(error: BaseException) -> Outcome:
    """The outcome that an exception stands for; an unexpected one is a defect of Remesh, with its traceback."""
    text = _first_line(error)
    if isinstance(error, (ConfigError, StorageError)):
        return Outcome(Category.INPUT, str(error))
    if isinstance(error, PeerError):
        return Outcome(Category.INFRASTRUCTURE, str(error))
    if isinstance(error, RendezvousClosedError):
        return Outcome(
            Category.INPUT,
            "joining the job: a job of this name has ended already on this store, or is ending; give another --rdzv-id",
        )
    if isinstance(error, RendezvousTimeoutError):
        return Outcome(
            Category.INFRASTRUCTURE,
            "joining the job: it was not complete in time (--rdzv-conf join_timeout=...): too few nodes came, or the "
            "job has all its nodes and this one is a spare; start the missing nodes, or give another --rdzv-id",
        )
    if isinstance(error, (RendezvousError, dist.DistError)):
        if any(words in text for words in _ADDRESS_IN_USE):
            return Outcome(
                Category.INPUT,
                f"hosting the store: its port is taken, perhaps by another job ({text}); give another port",
            )
        return Outcome(
            Category.INFRASTRUCTURE, f"meeting the other nodes: {text}; is the store's host up, and reachable?"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return Outcome(Category.INFRASTRUCTURE, f"{text}; this host has no more of it")
    detail = "".join(traceback.format_exception(error))
    return Outcome(Category.PLATFORM, f"{type(error).__name__}: {text}", detail)


def _first_line(error: BaseException) -> str:
    """The innermost cause's first line: torch's outer messages only point to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).partition("\n")[0]
