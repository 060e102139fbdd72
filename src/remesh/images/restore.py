"""How does a process come back from its image? A stub of the same program file is stopped before its first
instruction, emptied, and filled with what the image holds; then it runs on. Called by our init, inside the namespaces.

    check      the machine, mapped files, open files: nothing is made before all fits
    stub       fork with the wanted id, exec, stop
    empty      everything is unmapped but the kernel's own areas, which move to where they were
    memory     areas are mapped, pages written
    process    addresses of parts, open files, signal actions
    threads    made with their ids; registers and masks; all run on

*Scratch* is memory in the stub for the arguments of injected calls and the instruction that makes them; it lies where
neither the stub nor the image has anything, and goes last.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import time
from collections.abc import Iterable
from typing import Final

from remesh.errors import FormatError, StorageError
from remesh.images import open_files
from remesh.images.format import AreaState, FileIdentity, ProcessState, ThreadState
from remesh.images.identity import has_identity
from remesh.images.inspection import is_bound_by_the_site
from remesh.images.kinds import CHANNEL_PATH, OpenFilePolicy
from remesh.images.machine import check_fits, this_machine
from remesh.images.namespaces import choose_next_pid, forget_signal_actions, leave_group
from remesh.images.pages import place_runs
from remesh.images.ptrace import (
    OPTION_EXIT_KILL,
    OPTION_TRACE_CLONE,
    SYSCALL_INSTRUCTION,
    Registers,
    Tracee,
    find_instruction,
)
from remesh.images.seat import move_masks, processors_of, set_processors
from remesh.images.stored import StoredImage, source_runs, stored_pages
from remesh.linux.calls import (
    PAGE_BYTES,
    PR_SET_MM,
    PR_SET_MM_MAP,
    PR_SET_NAME,
    ptrace,
    write_process,
)
from remesh.linux.proc_text import AreaKind
from remesh.linux.procfs import read_areas

_TRACEME: Final = 0
_SCRATCH_BYTES: Final = open_files.SCRATCH_BYTES
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
_ID_PATIENCE_S: Final = 5.0
_MM_MAP: Final = struct.Struct("<12QIi")
_LOWEST_ADDRESS: Final = 0x10000
_WORD: Final = 1 << 64
_NO_CALL: Final = _WORD - 1
_RESTART_BLOCK: Final = _WORD - 516
_RESTART: Final = (_WORD - 512, _WORD - 513, _WORD - 514, _RESTART_BLOCK)  # ERESTARTSYS, NOINTR, NOHAND
_SLEEPS: Final = {35: ("rdi", "rsi"), 230: ("rdx", "r10")}
"""nanosleep and clock_nanosleep: registers with the addresses of the time to sleep, and of what is left of it."""


def bring_back(image: StoredImage, policy: OpenFilePolicy) -> str:
    """Make the process of the image a child of this one; it runs when this returns. On failure it is killed.

    Returns what its user should know about how it came back; "" if there is nothing to tell.

    Raises `FormatError` when the image does not fit this machine, `StorageError` when a file is gone or changed.
    """
    check_mapped_files(image)
    open_files.check_open_files(image, policy)
    _check_machine(image, image.header.machine.xstate_bytes)
    if image.channel is not None:
        with open(CHANNEL_PATH, "r+b", buffering=0) as file:
            file.write(image.channel.ljust(os.fstat(file.fileno()).st_size, b"\0"))
    open_files.cut_open_files(image, policy)
    leader = Tracee(_start_stub(image))
    try:
        return _fill(image, leader)
    except BaseException:
        os.kill(leader.tid, 9)
        raise


def check_mapped_files(image: StoredImage) -> None:
    """Raise `StorageError` unless every file that the process had mapped is what it was."""
    for path, identity in image.areas.files.items():
        if is_bound_by_the_site(path):
            continue
        try:
            good = has_identity(path, identity) if identity.sha256 else os.stat(path).st_size >= identity.num_bytes
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
        f"{identity.num_bytes} bytes with SHA-256 {identity.sha256[:12] or 'of any kind'}, found "
        f"{os.stat(path).st_size} bytes; restart on machines with the same system image"
    )


def _check_machine(image: StoredImage, xstate_bytes: int) -> None:
    check_fits(image.header.machine, this_machine(xstate_bytes), str(image.folder))


# --- stub ---


def _start_stub(image: StoredImage) -> int:
    """A process of the image's program file with the image's id, stopped before its first instruction."""
    choose_next_pid(image.header.pid)
    pid = os.fork()
    if pid == 0:
        try:
            leave_group(leads_session=image.process.leads_session)
            forget_signal_actions()
            os.chdir(image.process.folder)
            os.umask(image.process.umask)
            os.closerange(0, os.sysconf("SC_OPEN_MAX"))
            ptrace(_TRACEME, 0)
            os.execve(image.process.executable, [image.process.executable], {})
        finally:
            os._exit(127)
    if pid != image.header.pid:
        os.kill(pid, 9)
        raise RuntimeError(f"restoring {image.folder}: the process got id {pid}, expected {image.header.pid}")
    return pid


def _fill(image: StoredImage, leader: Tracee) -> str:
    leader.wait_until_stopped()
    leader.set_options(OPTION_TRACE_CLONE | OPTION_EXIT_KILL)
    _check_machine(image, len(leader.xstate()))
    scratch = _make_scratch(image, leader)
    _empty(image, leader, scratch)
    for area in image.areas.areas:
        if area.kind is not AreaKind.SPECIAL:
            _map(leader, area, scratch)
    _write_pages(image, leader)
    _set_process(image.process, leader, scratch)
    open_files.reopen(image, leader, scratch)
    tracees = [leader, *(_make_thread(leader, thread, scratch) for thread in image.threads.threads[1:])]
    for tracee, thread in zip(tracees, image.threads.threads, strict=True):
        _set_thread(tracee, thread, scratch, image.header.pid)
    note = _seat_threads(image, tracees)
    _leave(image, tracees, scratch)
    return note


def _seat_threads(image: StoredImage, tracees: list[Tracee]) -> str:
    """Pin the threads as they were pinned, to this seat; what to tell if that cannot be."""
    old, new = image.process.seat, processors_of(0)
    masks = move_masks([thread.processors for thread in image.threads.threads], old, new)
    if masks is None:
        return (
            f"threads were pinned to some of {old.bit_count()} processors and now run on all of the {new.bit_count()} "
            "that there are; for their old places start each rank with as many as before"
        )
    for tracee, mask in zip(tracees, masks, strict=True):
        if mask != new:
            set_processors(tracee.tid, mask)
    return ""


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
    """Map scratch memory and inject by it from now on; its address."""
    vdso = next(area for area in read_areas(leader.tid) if area.path == "[vdso]")
    instruction = find_instruction(leader.read, vdso.start, vdso.end)
    if instruction is None:
        raise FormatError("other-kernel", f"restoring {image.folder}: this kernel's own code has no system call in it")
    leader.prepare(instruction)
    address = find_gap(_ranges(image, leader.tid), _SCRATCH_BYTES)
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED
    scratch = leader.call("mmap", address, _SCRATCH_BYTES, _READ_WRITE_EXECUTE, flags, -1, 0)
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


def _map(leader: Tracee, area: AreaState, scratch: int) -> None:
    protection = sum(_PROTECTIONS[letter] for letter in area.protection[:3] if letter in _PROTECTIONS)
    num_bytes = area.end - area.start
    if area.kind is AreaKind.ANONYMOUS:
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        flags |= _MAP_GROWSDOWN if area.grows_down else 0
        leader.call("mmap", area.start, num_bytes, protection, flags, -1, 0)
        return
    shared = area.kind is AreaKind.SHARED_FILE
    mode = os.O_RDWR if shared and "w" in area.protection else os.O_RDONLY
    leader.write(scratch + PAGE_BYTES, os.fsencode(area.path) + b"\0")
    descriptor = leader.call("openat", _AT_FDCWD, scratch + PAGE_BYTES, mode, 0)
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


def _set_process(process: ProcessState, leader: Tracee, scratch: int) -> None:
    data = scratch + PAGE_BYTES
    bounds = process.bounds
    addresses = [getattr(bounds, name) for name in bounds.__dataclass_fields__]
    record = _MM_MAP.pack(*addresses, data + _MM_MAP.size, len(process.auxv), -1)
    leader.write(data, record + process.auxv)
    leader.call("prctl", PR_SET_MM, PR_SET_MM_MAP, data, _MM_MAP.size, 0)
    for number, action in process.signal_actions.items():
        leader.write(data, action)
        leader.call("rt_sigaction", number, data, 0, 8)
    for number in _signals(process.pending_signals):
        leader.call("kill", leader.tid, number)
    for limit, (soft, _) in process.limits.items():
        hard = resource.prlimit(leader.tid, limit)[1]
        soft = soft if hard == resource.RLIM_INFINITY or 0 <= soft <= hard else hard
        resource.prlimit(leader.tid, limit, (soft, hard))


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
    """Threads of this process that read pages had ids, too, which are free a moment after their last word."""
    deadline_s = time.monotonic() + _ID_PATIENCE_S
    while os.path.exists(f"/proc/{tid}") and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _set_thread(tracee: Tracee, thread: ThreadState, scratch: int, group: int) -> None:
    data = scratch + PAGE_BYTES
    if thread.robust_list:
        tracee.call("set_robust_list", thread.robust_list, thread.robust_list_bytes)
    tracee.call("set_tid_address", thread.clear_child_tid)
    if thread.rseq:
        tracee.call("rseq", thread.rseq, thread.rseq_bytes, 0, thread.rseq_signature)
    tracee.write(data, thread.name.encode(errors="surrogateescape")[:15] + b"\0")
    tracee.call("prctl", PR_SET_NAME, data, 0, 0, 0)
    tracee.write(data, thread.signal_stack)
    tracee.call("sigaltstack", data, 0)
    for number in _signals(thread.pending_signals):
        tracee.call("tgkill", group, thread.tid, number)


def _leave(image: StoredImage, tracees: list[Tracee], scratch: int) -> None:
    """Remove the scratch memory by the kernel's own code, set every thread's registers, and let all run on."""
    leader = tracees[0]
    if not image.process.dumpable:
        leader.call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    for which, timer in image.process.interval_timers.items():  # a signal of theirs waits until its mask is put back
        leader.write(scratch + PAGE_BYTES, timer)
        leader.call("setitimer", which, scratch + PAGE_BYTES, 0)
    vdso = _special(image.areas.areas)["[vdso]"]
    instruction = find_instruction(leader.read, vdso.start, vdso.end)
    if instruction is None:
        raise FormatError("other-kernel", f"restoring {image.folder}: no system call in the kernel's own code")
    leader.use_instruction_at(instruction)
    leader.call("munmap", scratch, _SCRATCH_BYTES)
    for tracee, thread in zip(tracees, image.threads.threads, strict=True):
        tracee.set_xstate(thread.xstate)
        tracee.set_registers(resumed(thread.registers))
        tracee.set_signal_mask(thread.signal_mask)
    for tracee in tracees:
        tracee.close()
        tracee.detach()


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
