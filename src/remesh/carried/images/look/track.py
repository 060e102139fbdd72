"""Dirty-page tracking of a process between images, by a userfaultfd in WP_ASYNC mode.

1. The frozen process makes a userfaultfd (an injected call); this process takes a copy and the original is closed, so
   the program holds none of this process's descriptors, and tracking ends with this process.
2. Private memory of which an image has pages is registered, and those are write-protected: the *mark*. The first write
   to such a page costs the program half a microsecond and takes the mark off; no fault is ever delivered.
3. At the next image the pages without a mark are the written ones. Areas mapped since have no marks: saved in full.
4. Once its pages have been read, those without a mark get one, by the same scan that finds them; while the last ones
   are written. If that image fails after all, the next one is full.

Pages that are not there get no mark: the kernel would show it as a page in swap. Dropping a marked page of a mapped
file (madvise) leaves such a mark behind, so what looks like a page in swap there counts as written (`memory`).

Marks are relative to one image, known by the digest of its header: an increment upon any other would be wrong, so it
is not made. Source: Documentation/admin-guide/mm/pagemap.rst and userfaultfd.rst; Linux 6.7 or newer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from remesh.carried.images.form.format import Ancestor
from remesh.carried.images.form.layers import Layer
from remesh.carried.images.form.ranges import PageSet
from remesh.carried.images.look.frozen_process import FrozenProcess
from remesh.carried.images.look.pagemap import PageMap, private_spans
from remesh.foundation.linux import userfault
from remesh.foundation.linux.calls import borrow_descriptor
from remesh.foundation.linux.procfs import start_of
from remesh.foundation.linux.userfault import Feature


@dataclass(frozen=True, slots=True)
class Basis:
    """The image that marks are relative to: the basis of the next increment, so that it is not read again."""

    sha256: str  # of its header
    layers: tuple[Layer, ...]  # its own pages first, then those of `builds_upon`
    builds_upon: tuple[Ancestor, ...]


@dataclass(frozen=True, slots=True)
class _Tracking:
    """The tracking of one process: its userfaultfd and its basis."""

    descriptor: int  # our copy of its userfaultfd
    basis: Basis | None  # None while the image that the marks are relative to is not complete


_TRACKED: Final[dict[tuple[int, int], _Tracking]] = {}
"""The tracked processes, by process id and time of start: ids are used again."""


def basis_of(pid: int, sha256: str) -> Basis | None:
    """The basis of a process's marks, if that is the image whose header has this digest."""
    tracking = _TRACKED.get(_key(pid))
    basis = None if tracking is None else tracking.basis
    return basis if basis is not None and basis.sha256 == sha256 else None


def set_marks(process: FrozenProcess, written: PageSet) -> str:
    """Mark the pages of a frozen process, all of which have been read, as unwritten from now on.

    ``written`` are those that have no mark yet, in order: nothing else changes while the process is frozen, and
    areas without any are saved whole the next time. The marks are relative to no image until `keep_basis` names one: if
    that does not come to be, the next is a full one. Returns why it is not possible on this machine, or "" when it was
    done.
    """
    key = _key(process.pid)
    try:
        descriptor = _TRACKED[key].descriptor if key in _TRACKED else _make_descriptor(process)
        _TRACKED[key] = _Tracking(descriptor, None)
        with PageMap(process.pid) as pages:
            for span in private_spans(process.areas):
                first, last = written.touching(span.start, span.end)
                if first == last:
                    continue
                userfault.register(descriptor, span.start, span.end - span.start)
                pages.mark(span, written.starts[first], written.ends[last - 1])
    except OSError as error:
        forget(process.pid)
        return f"changed pages cannot be tracked here: {error.strerror}; Linux 6.7 with userfaultfd is needed"
    return ""


def keep_basis(pid: int, basis: Basis) -> None:
    """Note that the image is complete to which the marks of a process are relative."""
    key = _key(pid)
    _TRACKED[key] = _Tracking(_TRACKED[key].descriptor, basis)


def forget(pid: int) -> None:
    """End the tracking of a process, if there is any: its next image will be a full one."""
    tracking = _TRACKED.pop(_key(pid), None)
    if tracking is not None:
        os.close(tracking.descriptor)


def _key(pid: int) -> tuple[int, int]:
    started = start_of(pid)
    if started is None:
        raise ProcessLookupError(f"process {pid} has ended")
    return pid, started


def _make_descriptor(process: FrozenProcess) -> int:
    _forget_ended()
    with _injected_calls(process):
        theirs = process.leader.call("userfaultfd", os.O_CLOEXEC | userfault.USER_MODE_ONLY)
        try:
            ours = borrow_descriptor(process.pid, theirs)
        finally:
            process.leader.call("close", theirs)
    try:
        userfault.enable(ours, Feature.WP_ASYNC | Feature.WP_UNPOPULATED)
    except OSError:
        os.close(ours)
        raise
    return ours


@contextlib.contextmanager
def _injected_calls(process: FrozenProcess) -> Iterator[None]:
    process.prepare_calls()
    try:
        yield
    finally:
        process.finish_calls()


def _forget_ended() -> None:
    for pid, started in list(_TRACKED):
        if start_of(pid) != started:
            os.close(_TRACKED.pop((pid, started)).descriptor)
