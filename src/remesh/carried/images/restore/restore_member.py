"""Restore of one process from its image, called by our init inside the namespaces.

A stub of the same program file, stopped before its first instruction, is emptied and filled with what the image holds.

    empty      everything is unmapped but the kernel's own areas, which move to where they were
    memory     areas are mapped, pages written
    process    addresses of parts, folder, signal actions, descriptors
    threads    made with their ids
    leave      registers and masks; all run on

*Scratch* is memory in the stub for the arguments of injected calls and the instruction that makes them; it lies where
neither the stub nor the image has anything, and goes last.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from remesh.carried.images.form.format import AreaState, FilesState, ProcessState, ThreadState
from remesh.carried.images.form.image_reader import StoredImage, source_runs, stored_pages
from remesh.carried.images.form.locks import take_of_process
from remesh.carried.images.form.pages import place_runs
from remesh.carried.images.form.processor_state import check_fits, this_machine
from remesh.carried.images.look.polls import watch_again
from remesh.carried.images.restore.open_files import OpenedFiles
from remesh.carried.images.restore.process_namespaces import choose_next_pid
from remesh.foundation.errors import FormatError, PeerError, StorageError
from remesh.foundation.linux.calls import (
    PAGE_BYTES,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DEATH_SIGNAL,
    PR_SET_MM,
    PR_SET_MM_MAP,
    PR_SET_NAME,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_TIMER_SLACK,
    write_process,
)
from remesh.foundation.linux.proc_text import AreaKind
from remesh.foundation.linux.procfs import read_areas
from remesh.foundation.linux.ptrace import SYSCALL_INSTRUCTION, Registers, Tracee, find_instruction

SCRATCH_BYTES: Final = 16 * PAGE_BYTES
"""Length of scratch memory; the first page holds the instruction, the rest is for data."""
_PROTECTIONS: Final = {"r": 1, "w": 2, "x": 4}
_READ_WRITE_EXECUTE: Final = 7
_MAP_SHARED: Final = 0x01
_MAP_PRIVATE: Final = 0x02
_MAP_FIXED: Final = 0x10
_MAP_ANONYMOUS: Final = 0x20
_MAP_GROWSDOWN: Final = 0x100
_MAP_NORESERVE: Final = 0x4000
_MREMAP_TO: Final = 0x1 | 0x2  # MAYMOVE | FIXED
_AT_FDCWD: Final = -100
_CLONE_THREAD: Final = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000  # VM FS FILES SIGHAND THREAD SYSVSEM
_PR_SET_DUMPABLE: Final = 4
_ID_TIMEOUT_S: Final = 5.0
_MAX_UNSIGNED: Final = (1 << 32) - 1
_MM_MAP: Final = struct.Struct("<12QIi")
_LOWEST_ADDRESS: Final = 0x10000
_WORD: Final = 1 << 64
_NO_CALL: Final = _WORD - 1
_RESTART_BLOCK: Final = _WORD - 516
_RESTART: Final = (_WORD - 512, _WORD - 513, _WORD - 514, _RESTART_BLOCK)  # ERESTARTSYS, NOINTR, NOHAND
_SLEEPS: Final = {35: ("rdi", "rsi"), 230: ("rdx", "r10")}
"""The calls nanosleep and clock_nanosleep: registers with the addresses of the time to sleep, and of what is left."""


@dataclass(slots=True)
class Stub:
    """A process that is to become another."""

    leader: Tracee
    scratch: int  # address

    @property
    def data(self) -> int:
        """The address for arguments of injected calls."""
        return self.scratch + PAGE_BYTES


def empty_stub(leader: Tracee, image: StoredImage) -> Stub:
    """Make a process that stands at the beginning of its program ready for the image, which needs the same machine."""
    xstate_bytes = len(leader.xstate())
    check_fits(image.header.machine, this_machine(xstate_bytes), str(image.folder))
    scratch = _make_scratch(image, leader)
    _empty(image, leader, scratch)
    return Stub(leader, scratch)


def fill_stub(stub: Stub, image: StoredImage, opened: OpenedFiles) -> list[Tracee]:
    """Give a stub the memory, descriptors and threads of an image; returns all of its threads, the leader first."""
    leader = stub.leader
    for area in image.areas.areas:
        if area.kind is not AreaKind.SPECIAL:
            _map(stub, area, opened)
    _write_pages(image, leader)
    _set_process(image.process, stub)
    _set_descriptors(image.files, leader, opened)
    take_of_process(leader, stub.data, opened.locks.get(image.header.pid, ()))
    watch_again(leader, stub.data, opened.watches.get(image.header.pid, ()))
    tracees = [leader, *(_make_thread(leader, thread, stub.scratch) for thread in image.threads.threads[1:])]
    for tracee, thread in zip(tracees, image.threads.threads, strict=True):
        _set_thread(tracee, thread, stub.data)
    _set_limits(image.process, leader)  # which may allow no other thread
    return tracees


def _special(areas: Iterable[AreaState]) -> dict[str, AreaState]:
    return {area.path: area for area in areas if area.kind is AreaKind.SPECIAL and area.path != "[vsyscall]"}


def find_gap(occupied: Iterable[tuple[int, int]], num_bytes: int) -> int:
    """The lowest address from 64 KiB on where ``num_bytes`` are free of all ``occupied`` ranges (start, end).

    >>> hex(find_gap([(0x10000, 0x12000), (0x13000, 0x14000)], 0x2000))
    '0x14000'
    """
    at = _LOWEST_ADDRESS
    for start, end in sorted(occupied):
        if at + num_bytes <= start:
            return at
        at = max(at, end)
    return at


def _ranges(image: StoredImage, pid: int) -> list[tuple[int, int]]:
    mapped = [(area.start, area.end) for area in read_areas(pid)]
    return mapped + [(area.start, area.end) for area in image.areas.areas]


def _make_scratch(image: StoredImage, leader: Tracee) -> int:
    """Map scratch memory and inject by it from now on; returns its address."""
    vdso = next(area for area in read_areas(leader.tid) if area.path == "[vdso]")
    instruction = find_instruction(leader.read, vdso.start, vdso.end)
    if instruction is None:
        raise FormatError("other-kernel", f"restoring {image.folder}: this kernel's own code has no system call in it")
    leader.prepare(instruction)
    address = find_gap(_ranges(image, leader.tid), SCRATCH_BYTES)
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED
    scratch = leader.call("mmap", address, SCRATCH_BYTES, _READ_WRITE_EXECUTE, flags, -1, 0)
    leader.write(scratch, SYSCALL_INSTRUCTION)
    leader.use_instruction_at(scratch)
    return scratch


def _empty(image: StoredImage, leader: Tracee, scratch: int) -> None:
    """Unmap the stub's own memory; move the kernel's areas out of the way, then to where the image had them."""
    areas = read_areas(leader.tid)
    for area in areas:
        if area.kind is not AreaKind.SPECIAL and area.start != scratch:
            leader.call("munmap", area.start, area.num_bytes)
    wanted = _special(image.areas.areas)
    found = {area.path: area.start for area in areas if area.path in wanted}
    occupied = _ranges(image, leader.tid)
    for name, special in wanted.items():
        parked = find_gap(occupied, special.end - special.start)
        occupied.append((parked, parked + special.end - special.start))
        found[name] = _move(leader, found[name], parked, special.end - special.start)
    for name, special in wanted.items():
        _move(leader, found[name], special.start, special.end - special.start)


def _move(leader: Tracee, start: int, target: int, num_bytes: int) -> int:
    return leader.call("mremap", start, num_bytes, num_bytes, _MREMAP_TO, target)


# --- memory ---


def _map(stub: Stub, area: AreaState, opened: OpenedFiles) -> None:
    leader = stub.leader
    protection = sum(_PROTECTIONS[letter] for letter in area.protection[:3] if letter in _PROTECTIONS)
    num_bytes = area.end - area.start
    if area.kind is AreaKind.ANONYMOUS:
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        flags |= _MAP_GROWSDOWN if area.grows_down else 0
        leader.call("mmap", area.start, num_bytes, protection, flags, -1, 0)
        return
    if area.carried is not None:
        flags = _MAP_SHARED | _MAP_FIXED
        leader.call("mmap", area.start, num_bytes, protection, flags, opened.carried[area.carried], area.offset)
        return
    shared = area.kind is AreaKind.SHARED_FILE
    mode = os.O_RDWR if shared and "w" in area.protection else os.O_RDONLY
    leader.write(stub.data, os.fsencode(area.path) + b"\0")
    descriptor = leader.call("openat", _AT_FDCWD, stub.data, mode, 0)
    flags = _MAP_FIXED | (_MAP_SHARED if shared else _MAP_PRIVATE)
    leader.call("mmap", area.start, num_bytes, protection, flags, descriptor, area.offset)
    leader.call("close", descriptor)


def _write_pages(image: StoredImage, leader: Tracee) -> None:
    memory = leader.memory_descriptor()

    def put(address: int, data: memoryview) -> None:
        # Faster, but it fails where the process itself may not write, and may stop at the border of such an area.
        with contextlib.suppress(OSError):
            if not data.readonly and write_process(leader.tid, address, data) == len(data):
                return
        if os.pwrite(memory, data, address) != len(data):
            raise StorageError(
                f"restoring {image.folder}: memory at {address:#x} could not be filled; free some memory"
            )

    folders = image.source_folders()
    for source, runs in sorted(source_runs(image).items()):
        place_runs(runs, stored_pages(folders[source]), put)


# --- process ---


def _set_process(process: ProcessState, stub: Stub) -> None:
    leader, data = stub.leader, stub.data
    bounds = process.bounds
    addresses = [getattr(bounds, name) for name in bounds.__dataclass_fields__]
    record = _MM_MAP.pack(*addresses, data + _MM_MAP.size, len(process.auxv), -1)
    leader.write(data, record + process.auxv)
    leader.call("prctl", PR_SET_MM, PR_SET_MM_MAP, data, _MM_MAP.size, 0)
    leader.write(data, os.fsencode(process.folder) + b"\0")
    leader.call("chdir", data)
    leader.call("umask", process.umask)
    leader.call("prctl", PR_SET_CHILD_SUBREAPER, int(process.is_subreaper), 0, 0, 0)
    leader.call("prctl", PR_SET_DEATH_SIGNAL, process.death_signal, 0, 0, 0)
    for number, action in process.signal_actions.items():
        leader.write(data, action)
        leader.call("rt_sigaction", number, data, 0, 8)


def _set_descriptors(files: FilesState, leader: Tracee, opened: OpenedFiles) -> None:
    """Set the descriptors of a stub, which has all open files of the tree at high numbers, and its maker's low ones."""
    leader.call("close_range", 0, opened.lowest - 1, 0)
    for each in files.descriptors:
        leader.call("dup3", opened.files[each.file], each.number, os.O_CLOEXEC if each.closes_on_exec else 0)
    leader.call("close_range", opened.lowest, _MAX_UNSIGNED, 0)


def _set_limits(process: ProcessState, leader: Tracee) -> None:
    """Set the limits that the process had, or those of this machine where they are lower."""
    for limit, (soft, hard) in process.limits.items():
        highest = _lower(hard, resource.prlimit(leader.tid, limit)[1])
        resource.prlimit(leader.tid, limit, (_lower(soft, highest), highest))


def _lower(*limits: int) -> int:
    return min(limits, key=lambda limit: math.inf if limit == resource.RLIM_INFINITY else limit)


def _signals(mask: int) -> list[int]:
    return [number for number in range(1, 65) if mask >> (number - 1) & 1]


# --- threads ---


def _make_thread(leader: Tracee, thread: ThreadState, scratch: int) -> Tracee:
    _wait_until_free(thread.tid)
    choose_next_pid(thread.tid)
    tid = leader.call_clone("clone", _CLONE_THREAD, 0, 0, 0, 0)
    if tid != thread.tid:
        raise RuntimeError(f"restoring a thread: it got id {tid}, expected {thread.tid}")
    tracee = Tracee(tid)
    tracee.wait_until_stopped()
    tracee.prepare(scratch)
    return tracee


def _wait_until_free(tid: int) -> None:
    """Wait until an id is free: threads of this process that read pages keep theirs a moment after their last word."""
    deadline_s = time.monotonic() + _ID_TIMEOUT_S
    while os.path.exists(f"/proc/{tid}") and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _set_thread(tracee: Tracee, thread: ThreadState, data: int) -> None:
    if thread.robust_list:
        tracee.call("set_robust_list", thread.robust_list, thread.robust_list_bytes)
    tracee.call("set_tid_address", thread.clear_child_tid)
    if thread.rseq:
        tracee.call("rseq", thread.rseq, thread.rseq_bytes, 0, thread.rseq_signature)
    tracee.write(data, thread.name.encode(errors="surrogateescape")[:15] + b"\0")
    tracee.call("prctl", PR_SET_NAME, data, 0, 0, 0)
    tracee.write(data, thread.signal_stack)
    tracee.call("sigaltstack", data, 0)
    tracee.call("prctl", PR_SET_TIMER_SLACK, thread.timer_slack_ns, 0, 0, 0)
    if thread.no_new_privs:
        tracee.call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def set_pending_signals(image: StoredImage, stub: Stub, tracees: list[Tracee]) -> None:
    """Set exactly the signals that were pending: those that the ends of stubs have left are taken away."""
    leader, pid = stub.leader, image.header.pid
    leader.write(stub.data, (1 << signal.SIGCHLD - 1).to_bytes(8, "little") + bytes(16))
    with contextlib.suppress(BlockingIOError):
        while True:
            leader.call("rt_sigtimedwait", stub.data, 0, stub.data + 8, 8)
    for number in _signals(image.process.pending_signals):
        leader.call("kill", pid, number)
    for tracee, thread in zip(tracees, image.threads.threads, strict=True):
        for number in _signals(thread.pending_signals):
            tracee.call("tgkill", pid, thread.tid, number)


def let_go(image: StoredImage, stub: Stub, tracees: list[Tracee]) -> None:
    """Remove the scratch memory by the kernel's own code, set every thread's registers, and let all run on."""
    leader = stub.leader
    if not image.process.dumpable:
        leader.call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    for which, timer in image.process.interval_timers.items():  # a signal of theirs waits until its mask is put back
        leader.write(stub.data, timer)
        leader.call("setitimer", which, stub.data, 0)
    vdso = _special(image.areas.areas)["[vdso]"]
    instruction = find_instruction(leader.read, vdso.start, vdso.end)
    if instruction is None:
        raise FormatError("other-kernel", f"restoring {image.folder}: no system call in the kernel's own code")
    leader.use_instruction_at(instruction)
    leader.call("munmap", stub.scratch, SCRATCH_BYTES)
    for tracee, thread in zip(tracees, image.threads.threads, strict=True):
        tracee.set_xstate(thread.xstate)
        tracee.set_registers(resumed(thread.registers))
        tracee.set_signal_mask(thread.signal_mask)
    for tracee in tracees:
        tracee.close()
        if not tracee.detach():
            raise PeerError(f"restoring {image.folder}: its process {image.header.pid} was killed before it ran")


def resumed(registers: Registers) -> Registers:
    """The registers with which a thread goes on: a call in which it was stopped is made again.

    That is so, too, where the kernel would have gone on with state of its own (-516): programs in C do not expect that
    a sleep, a poll or a wait ends without a reason. A sleep goes on with what is left of it, where the program has
    given a place for that, which the kernel has filled; any other limit counts from its beginning.
    """
    result = {**registers, "orig_rax": _NO_CALL}
    number = registers["orig_rax"]
    if number < _WORD // 2 and registers["rax"] in _RESTART:
        result.update(rax=number, rip=registers["rip"] - len(SYSCALL_INSTRUCTION))
        if registers["rax"] == _RESTART_BLOCK and number in _SLEEPS:
            wanted, left = _SLEEPS[number]
            result[wanted] = registers[left] or registers[wanted]
    return result
