"""Hashes of the files that a process has mapped or reads, computed before it is frozen.

A program may have a thousand files mapped, a data set in pieces, and each takes up to a twentieth of a second. Most
files stay as they are, so their hashes are found while the program runs; the rest, while its pages are written.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import filterfalse
from typing import Final

from remesh.carried.images.form.format import is_written
from remesh.carried.images.form.identity import IDENTITIES
from remesh.carried.images.form.tree_format import FileKind
from remesh.carried.images.look.capture import mapped_paths
from remesh.carried.images.look.frozen_process import FrozenProcess
from remesh.carried.images.look.inspection import is_bound_by_the_site, kind_of
from remesh.carried.images.look.process_tree import tree_of
from remesh.foundation.errors import PeerError
from remesh.foundation.linux.proc_text import Area
from remesh.foundation.linux.procfs import read_areas, read_descriptors
from remesh.foundation.thread_pool import PooledExecutor
from remesh.foundation.threads import make_thread

_POLLS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses between looks: a program loads most libraries as it starts, some later. A later look finds hashes known."""
_NICE: Final = 10
"""A tenth of a processor where all are busy: at the lowest priority, hashes take a minute beside ranks that compute."""
_BESIDE: Final = PooledExecutor(1, "hash")
"""For hashes that are found while pages are written."""


def hash_ahead(pid: int) -> None:
    """Hash what a process and its descendants have mapped or read: no image has to while they are frozen.

    They may run, and end, meanwhile.
    """
    for each in tree_of(pid):
        with contextlib.suppress(OSError, PeerError):
            IDENTITIES.gather([*_mapped(each, read_areas(each)), *_open_to_read(each)])


def start_hashing_beside(processes: Iterable[FrozenProcess]) -> Future[None]:
    """Hash what frozen processes have mapped, in a thread, while other things of them are written."""
    paths = [path for each in processes for path in _mapped(each.pid, each.areas)]
    return _BESIDE.submit(IDENTITIES.gather, paths)


def _mapped(pid: int, areas: Iterable[Area]) -> Iterable[str]:
    """The mapped files, as seen from here, whose time shows when they change."""
    return mapped_paths(pid, filterfalse(is_written, areas)).values()


def _open_to_read(pid: int) -> Iterator[str]:
    """The files that a process has open and does not write itself, as seen from here: a table of samples, perhaps."""
    for each in read_descriptors(pid):
        is_read = each.flags & os.O_ACCMODE == os.O_RDONLY and not is_bound_by_the_site(each.link)
        if is_read and kind_of(pid, each) is FileKind.FILE:
            yield f"/proc/{pid}/fd/{each.number}"


def start_hashing_ahead(pid: int, pauses_s: Sequence[float] = _POLLS_S) -> threading.Thread:
    """Run `hash_ahead` in a thread that leaves most of the processors to others, again after each of these pauses."""
    thread = make_thread("hash-ahead", _hash_aside, pid, pauses_s, daemon=True)
    thread.start()
    return thread


def _hash_aside(pid: int, pauses_s: Sequence[float]) -> None:
    # Linux keeps this priority per thread. An image that comes first does not wait here: it hashes the rest itself.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        for pause_s in pauses_s:
            time.sleep(pause_s)
            hash_ahead(pid)
