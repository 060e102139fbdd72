"""Dump of a process tree to a folder: freeze, read, and resume or kill.

inspect   refusals, before anything is stopped; hashes of mapped files
freeze    every thread of every process is stopped
survey    refusals again, now of what cannot change any more; relatives, open files, shared memory
...       each process: see `dump_member`; meanwhile a thread hashes the mapped files that are not known yet
commit    each process; the root last, whose header makes it an image
"""

from __future__ import annotations

import contextlib
import errno
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from remesh.carried.images.form import format as image_format
from remesh.carried.images.form.carried import read_carried
from remesh.carried.images.form.identity import IDENTITIES
from remesh.carried.images.form.image_writer import ImageFolder
from remesh.carried.images.form.kinds import CHANNEL_PATH, ImageReport, NotImageable
from remesh.carried.images.form.locks import LocksState
from remesh.carried.images.form.tree_format import TreeState
from remesh.carried.images.form.written_files import find_place
from remesh.carried.images.look.affinity import processors_of
from remesh.carried.images.look.ahead import hash_ahead, start_hashing_beside
from remesh.carried.images.look.descriptor_survey import Survey, describe_sockets, survey_tree
from remesh.carried.images.look.frozen import Frozen, freeze
from remesh.carried.images.look.frozen_process import FrozenProcess
from remesh.carried.images.look.inspection import check_frozen, check_imageable
from remesh.carried.images.look.process_tree import kin_of, naming_the_ended
from remesh.carried.images.look.switch_interval import short_switch_interval
from remesh.carried.images.write.dump_member import (
    ImageOrder,
    Phases,
    SavedMember,
    TreeContext,
    WrittenMember,
    save_member,
)
from remesh.foundation.collector import collector_at_rest
from remesh.foundation.errors import StorageError
from remesh.foundation.linux.calls import PAGE_BYTES
from remesh.foundation.linux.proc_text import AreaKind
from remesh.foundation.linux.procfs import read_status, seen_from_here

_MAX_TRIALS: Final = 20
"""Limit of trials for a running program: a momentary state, such as a message on its way, is seldom met twice."""
_POLL_S: Final = 0.01


def dump_image(
    process: int | Frozen,
    directory: Path,
    *,
    previous: Path | None = None,
    compress: bool = False,
    track: bool = False,
) -> ImageReport:
    """Write the image of a process and its descendants into a new folder, for its owner only, flushed to the disk.

    ``process`` is a process id (frozen for the time of the dump, then it goes on) or a process that is frozen already
    (and stays so: the way to stop is to dump, commit, and `Upper.kill` it before thawing). With ``track`` the kernel
    notes which pages change from now on, so that a later image may name this one as ``previous`` and hold only those;
    the earlier one must then be kept, beside the later one. Includes the bytes of its channel.

    Raises `NotImageable` when the process has something an image cannot hold (nothing is left then), `StorageError`
    when the disk is full or the folder exists; the process goes on in both cases. `EndedError` when one ends or is
    killed meanwhile.
    """
    phases = Phases()
    order = ImageOrder(directory, previous, compress, track)
    if isinstance(process, Frozen):
        process.check_owner()
        return _dump_frozen(process, order, phases)
    with phases.phase("inspect"), naming_the_ended(f"dumping process {process}", lambda: [process]):
        if refusals := check_imageable(process):
            raise NotImageable(f"dumping process {process}", refusals)
        hash_ahead(process)
    for num_left in reversed(range(_MAX_TRIALS)):
        with phases.phase("freeze"):
            frozen = freeze(process)
        with frozen:
            try:
                return _dump_frozen(frozen, order, phases)
            except NotImageable as error:
                if not num_left or not all(each.is_passing for each in error.refusals):
                    raise
        time.sleep(_POLL_S)
    raise AssertionError("the last trial returns or raises")


@collector_at_rest()
@short_switch_interval()
def _dump_frozen(frozen: Frozen, order: ImageOrder, phases: Phases) -> ImageReport:
    try:
        doing = f"dumping process {frozen.pid} to {order.directory}, which was removed"
        held = [process.pid for process in frozen.processes]
        with naming_the_ended(doing, lambda: held), ImageFolder(order.directory) as folder:
            return _fill_folder(frozen, order, phases, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        raise StorageError(
            f"dumping process {frozen.pid} to {order.directory}: {error.strerror}; the image was removed and the "
            "process goes on; make room and take another"
        ) from error


def _fill_folder(frozen: Frozen, order: ImageOrder, phases: Phases, folder: ImageFolder) -> ImageReport:
    with phases.phase("survey"):
        if refusals := check_frozen(frozen):
            raise NotImageable(f"dumping process {frozen.pid}", refusals)
        seen_ns = time.time_ns()
        survey = survey_tree(frozen, IDENTITIES)
    with contextlib.closing(survey):
        with phases.phase("survey"):
            tree = _put_tree(frozen, survey, folder)
        names = tuple(sorted(name for file in tree.carried for name in file.names))
        written = [find_place(each, seen_from_here(frozen.pid, each.path), seen_ns) for each in survey.find_written()]
        report = _report(_dump_members(frozen, order, survey, phases, folder), phases)
        return replace(report, shared_names=names, written_files=tuple(written))


def _dump_members(
    frozen: Frozen, order: ImageOrder, survey: Survey, phases: Phases, folder: ImageFolder
) -> list[WrittenMember]:
    """Write the members, the root last, whose header names the others; its part is the first of the result."""
    context = TreeContext(survey, processors_of(int(read_status(frozen.pid)["PPid"])))
    hashing = start_hashing_beside(frozen.processes)
    with contextlib.ExitStack() as folders:

        def save(process: FrozenProcess) -> SavedMember:
            own_order = order.of_member(process.inner_pid)
            return save_member(
                process, own_order, context, phases, folders.enter_context(ImageFolder(own_order.directory))
            )

        others = [save(process) for process in frozen.processes[1:]]
        root = save_member(frozen.root, order, context, phases, folder)
        with phases.phase("hash"):
            hashing.result()
        members = {each.process.inner_pid: each.complete(survey, phases, {}) for each in others}
        digests = {pid: each.completed.sha256 for pid, each in members.items()}
        return [root.complete(survey, phases, digests), *members.values()]


def _put_tree(frozen: Frozen, survey: Survey, folder: ImageFolder) -> TreeState:
    """Write the parts that the processes have in common, and the channel of the root."""
    kin = kin_of([*(process.pid for process in frozen.processes), *frozen.ended])
    sockets = describe_sockets(survey, IDENTITIES)  # finds further open files
    carried = survey.describe_carried(frozen.pid)
    tree = TreeState(tuple(kin), tuple(survey.files), carried, tuple(survey.pipes.values()), sockets)
    folder.put(image_format.TREE_FILE, tree)
    if survey.locks:
        folder.put(image_format.LOCKS_FILE, LocksState(tuple(survey.locks.values())))
    if carried:
        folder.put_blocks(image_format.CARRIED_FILE, read_carried(list(survey.carried.values()), carried))
    if any(area.path == CHANNEL_PATH and area.kind is AreaKind.SHARED_FILE for area in frozen.root.areas):
        channel = Path(seen_from_here(frozen.pid, CHANNEL_PATH)).read_bytes()
        folder.put(image_format.CHANNEL_FILE, _without_zeros_at_end(channel))
    return tree


def _without_zeros_at_end(data: bytes) -> bytes:
    """The bytes without zeros at the end: most slots are of threads that the program lacks. A page may be left."""
    end = len(data)
    while end and data[max(end - PAGE_BYTES, 0) : end] == bytes(min(end, PAGE_BYTES)):
        end = max(end - PAGE_BYTES, 0)
    return data[:end]


def _report(written: list[WrittenMember], phases: Phases) -> ImageReport:
    """Make the report; the root's part is the first of ``written``."""
    needed = {str(folder) for folder in written[0].ancestors}
    needed |= {str(folder.parent) for each in written[1:] for folder in each.ancestors}
    return ImageReport(
        num_bytes=sum(each.completed.num_bytes for each in written),
        num_pages=sum(each.num_pages for each in written),
        num_pages_inherited=sum(each.num_pages_inherited for each in written),
        ancestors=tuple(sorted(needed)),
        seconds=phases.seconds,
        not_tracked=next((each.not_tracked for each in written if each.not_tracked), ""),
    )
