"""Restore of a process tree from its image, called by our init inside the namespaces.

    check      the machine, mapped files, open files: nothing is made before all fits
    open       every open file, once; all processes inherit them
    stubs      each is forked by its parent, in the order of `family`, executes its program file, and is emptied
    fill       memory, descriptors, threads of each: see `restore_member`
    end        those that had ended, and were not waited for, end again
    leave      all run on

Until the last step all are stopped. When this process ends, they end.
"""

from __future__ import annotations

import os
from typing import Final

from remesh.carried.images.form.family import INIT, FamilyDeed, FamilyStep, plan_family
from remesh.carried.images.form.format import FileIdentity
from remesh.carried.images.form.identity import has_identity
from remesh.carried.images.form.image_reader import StoredImage, StoredTree
from remesh.carried.images.form.kinds import CHANNEL_PATH, OpenFilePolicy
from remesh.carried.images.form.processor_state import check_fits, this_machine
from remesh.carried.images.look.affinity import move_masks, processors_of, set_processors
from remesh.carried.images.look.attributes import set_attributes
from remesh.carried.images.look.inspection import is_bound_by_the_site
from remesh.carried.images.restore import open_files
from remesh.carried.images.restore.open_files import OpenedFiles, opened_files
from remesh.carried.images.restore.process_namespaces import choose_next_pid, forget_signal_actions
from remesh.carried.images.restore.restore_member import Stub, empty_stub, fill_stub, let_go, set_pending_signals
from remesh.foundation.errors import StorageError
from remesh.foundation.linux.calls import ptrace
from remesh.foundation.linux.ptrace import (
    OPTION_EXIT_KILL,
    OPTION_TRACE_CLONE,
    OPTION_TRACE_EXEC,
    OPTION_TRACE_FORK,
    Tracee,
)

_TRACEME: Final = 0
_OPTIONS: Final = OPTION_TRACE_CLONE | OPTION_TRACE_FORK | OPTION_TRACE_EXEC | OPTION_EXIT_KILL
_SIGCHLD: Final = 17
_ALL_CHILDREN: Final = 0x40000000  # __WALL
_PR_SET_DUMPABLE: Final = 4


def bring_back(tree: StoredTree, policy: OpenFilePolicy | None) -> str:
    """Make the processes of the image descendants of this one; they run when this returns. On failure they are killed.

    Returns a note for their user on how they came back; "" if there is none.

    Raises `FormatError` when the image does not fit this machine, `StorageError` when a file is gone or changed.
    """
    for image in tree.members:
        _check_mapped_files(image)
        machine = image.header.machine
        check_fits(machine, this_machine(machine.xstate_bytes), str(image.folder))
    notes = [open_files.check_and_cut(tree, policy)]
    if tree.root.channel is not None:
        with open(CHANNEL_PATH, "r+b", buffering=0) as file:
            file.write(tree.root.channel.ljust(os.fstat(file.fileno()).st_size, b"\0"))
    stubs = _Stubs(tree)
    try:
        with opened_files(tree) as opened:
            notes.append(_make_all(tree, stubs, opened))
            return "; ".join(filter(None, notes))
    except BaseException:
        stubs.kill()
        raise


def _check_mapped_files(image: StoredImage) -> None:
    """Raise `StorageError` unless every file that the process had mapped is what it was."""
    written = image.areas.written_files()  # compared with the open files, by the same rule
    for path, identity in image.areas.files.items():
        if is_bound_by_the_site(path) or path in written:
            continue
        try:
            good = has_identity(path, identity)
        except OSError as error:
            raise StorageError(
                f"restoring {image.folder}: the program had {path} mapped, which cannot be read now: {error.strerror}; "
                "restart on machines with the same system image"
            ) from error
        if not good:
            raise StorageError(_changed(image, path, identity))


def _changed(image: StoredImage, path: str, identity: FileIdentity) -> str:
    return (
        f"restoring {image.folder}: the program had {path} mapped, which has changed: expected "
        f"{identity.num_bytes} bytes with SHA-256 {identity.sha256[:12]}, found "
        f"{os.stat(path).st_size} bytes; restart on machines with the same system image"
    )


def _make_all(tree: StoredTree, stubs: _Stubs, opened: OpenedFiles) -> str:
    for step in plan_family(tree.state.kin):
        stubs.take(step)
    threads = {}
    for image in reversed(tree.members):
        # Threads of this process that read pages keep their ids for a moment after all trace of them is gone.
        choose_next_pid(_first_free_id(tree))
        threads[image.header.pid] = fill_stub(stubs.by_pid[image.header.pid], image, opened)
    stubs.end_the_ended()
    notes = [_pin_threads(tree), _set_attributes(tree)]
    for image in tree.members:
        set_pending_signals(image, stubs.by_pid[image.header.pid], threads[image.header.pid])
    for image in reversed(tree.members):
        let_go(image, stubs.by_pid[image.header.pid], threads[image.header.pid])
    return "; ".join(filter(None, notes))


def _first_free_id(tree: StoredTree) -> int:
    """The first id behind all processes and threads that come back; beyond the kernel's limit, a small one again."""
    threads = [thread.tid for image in tree.members for thread in image.threads.threads]
    return max(*threads, *(each.pid for each in tree.state.kin)) + 1


def _set_attributes(tree: StoredTree) -> str:
    """Set how the kernel treats the processes and their threads; returns a note if some of it cannot be."""
    threads = [(each.tid, each.attributes) for image in tree.members for each in image.threads.threads]
    return set_attributes([*threads, *((image.header.pid, image.process.attributes) for image in tree.members)])


def _pin_threads(tree: StoredTree) -> str:
    """Pin the threads as they were pinned; returns a note if that cannot be."""
    old, new = tree.root.process.seat, processors_of(0)
    threads = [thread for image in tree.members for thread in image.threads.threads]
    masks = move_masks([thread.processors for thread in threads], old, new)
    if masks is None:
        return (
            f"threads were pinned to some of {old.bit_count()} processors and now run on all of the {new.bit_count()} "
            "that there are; for their old places start each rank with as many as before"
        )
    for thread, mask in zip(threads, masks, strict=True):
        if mask != new:
            set_processors(thread.tid, mask)
    return ""


class _Stubs:
    """The processes that are being made, by id."""

    def __init__(self, tree: StoredTree) -> None:
        self.by_pid: dict[int, Stub] = {}
        self._images = {image.header.pid: image for image in tree.members}
        self._root = tree.root
        self._ended = {each.pid: each for each in tree.state.kin if each.exit_status is not None}
        self._first: list[int] = []

    def kill(self) -> None:
        """Kill all of them."""
        for pid in {*self.by_pid, *self._first}:
            os.kill(pid, 9)

    def take(self, step: FamilyStep) -> None:
        """Do one step of the plan."""
        if step.deed is FamilyDeed.FORK:
            self._fork(step.pid, step.other)
            return
        stub = self.by_pid[step.pid]
        if step.deed is FamilyDeed.LEAD_SESSION:
            stub.leader.call("setsid")
        elif step.deed is FamilyDeed.LEAD_GROUP:
            stub.leader.call("setpgid", 0, 0)
        elif step.deed is FamilyDeed.JOIN_GROUP:
            stub.leader.call("setpgid", 0, step.other)
        else:
            self._end(step.pid)
            if step.other != INIT:
                self.by_pid[step.other].leader.call("wait4", step.pid, 0, _ALL_CHILDREN, 0)

    def _fork(self, pid: int, parent: int) -> None:
        """Make a stub of the program file of its image; of the root's, if it is not to live."""
        image = self._images.get(pid, self._root)
        choose_next_pid(pid)
        leader = self._fork_first(image) if parent == INIT else self._fork_of(self.by_pid[parent], pid, image)
        if leader.tid != pid:
            raise RuntimeError(f"restoring {image.folder}: a process got id {leader.tid}, expected {pid}")
        self.by_pid[pid] = empty_stub(leader, image)

    def _fork_first(self, image: StoredImage) -> Tracee:
        """Fork a child of this process, stopped before its first instruction."""
        pid = os.fork()
        if pid == 0:
            try:
                forget_signal_actions()
                ptrace(_TRACEME, 0)
                os.execve(image.process.executable, [image.process.executable], {})
            finally:
                os._exit(127)
        self._first.append(pid)
        leader = Tracee(pid)
        leader.wait_until_stopped()
        leader.set_options(_OPTIONS)
        return leader

    def _fork_of(self, parent: Stub, pid: int, image: StoredImage) -> Tracee:
        """Make another stub fork such a child."""
        tells_its_end = pid in self._images or pid in self._ended
        leader = Tracee(parent.leader.call_clone("clone", _SIGCHLD if tells_its_end else 0, 0, 0, 0, 0))
        leader.wait_until_stopped()
        leader.prepare(parent.scratch)
        path = os.fsencode(image.process.executable) + b"\0"
        arguments = parent.data + len(path) + -len(path) % 8
        leader.write(parent.data, path.ljust(arguments - parent.data, b"\0"))
        leader.write(arguments, parent.data.to_bytes(8, "little") + bytes(16))
        leader.call_exec(parent.data, arguments, arguments + 8)
        return leader

    def end_the_ended(self) -> None:
        """End the processes that had ended at the image: their parents have not waited for them yet."""
        for pid in self._ended:
            self._end(pid)

    def _end(self, pid: int) -> None:
        """End a process as it had ended; a fleeting one with status 0."""
        leader = self.by_pid[pid].leader
        status = self._ended[pid].exit_status or 0 if pid in self._ended else 0
        if os.WIFSIGNALED(status):
            leader.call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # no second core
            leader.die_by(os.WTERMSIG(status))
        else:
            leader.call_last("exit", os.WEXITSTATUS(status))
