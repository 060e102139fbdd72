"""What is the kernel state of a frozen process? Read from ``/proc``, from ptrace, and by calls injected into it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from dataclasses import dataclass, field
from typing import Final

from remesh.errors import PeerError
from remesh.images.clocks import clocks_of
from remesh.images.format import (
    AreasState,
    AreaState,
    FileIdentity,
    FileKind,
    FilesState,
    FileState,
    MemoryBounds,
    NamelessFile,
    ProcessState,
    ThreadState,
)
from remesh.images.frozen import Frozen
from remesh.images.identity import Identities
from remesh.images.inspection import is_bound_by_the_site, kind_of
from remesh.images.nameless import describe_nameless
from remesh.images.ptrace import Registers, Tracee
from remesh.images.seat import processors_of
from remesh.linux.calls import PR_GET_TID_ADDRESS, get_robust_list, system_call
from remesh.linux.proc_text import Area, AreaKind, Descriptor
from remesh.linux.procfs import (
    inner_id,
    read_descriptors,
    read_stat,
    read_status,
    seen_from_here,
)

_NUM_SIGNALS: Final = 64
_UNCATCHABLE: Final = (9, 19)
_ACTION_BYTES: Final = 32
_SIGNAL_STACK_BYTES: Final = 24
_ITIMER_BYTES: Final = 32
_INTERVAL_TIMERS: Final = (0, 1, 2)  # ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF
_RSEQ_CS_AT: Final = 8  # of the pointer to the critical section, in struct rseq
_CRITICAL_SECTION: Final = struct.Struct("<2I3Q")  # version, flags, start, length, abort address
_PR_GET_DUMPABLE: Final = 3
_KCMP: Final = 312
_KCMP_FILE: Final = 0
_LIMITS: Final = (resource.RLIMIT_STACK, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
_libc: Final = ctypes.CDLL(None, use_errno=True)


# --- process ---


def capture_process(frozen: Frozen, scratch: int) -> ProcessState:
    """What there is once in the process."""
    pid, leader = frozen.pid, frozen.leader
    stat_fields = read_stat(pid)
    numbers = [int(stat_fields[n - 1]) for n in (26, 27, 45, 46, 47)]
    start_code, end_code, start_data, end_data, start_brk = numbers
    ends = [int(stat_fields[n - 1]) for n in (48, 49, 50, 51)]
    bounds = MemoryBounds(
        *(start_code, end_code, start_data, end_data, start_brk, leader.call("brk", 0), int(stat_fields[28 - 1])), *ends
    )
    with open(f"/proc/{pid}/auxv", "rb") as file:
        auxv = file.read()
    status, clocks = read_status(pid), clocks_of(pid)
    return ProcessState(
        executable=os.readlink(f"/proc/{pid}/exe"),
        folder=os.readlink(f"/proc/{pid}/cwd"),
        umask=int(status["Umask"], 8),
        bounds=bounds,
        auxv=auxv,
        signal_actions=_signal_actions(leader, scratch, int(status["SigCgt"], 16) | int(status["SigIgn"], 16)),
        pending_signals=int(status["ShdPnd"], 16),
        limits={number: resource.prlimit(pid, number) for number in _LIMITS},
        dumpable=leader.call("prctl", _PR_GET_DUMPABLE, 0, 0, 0, 0) == 1,
        monotonic_ns=clocks.monotonic_ns,
        boottime_ns=clocks.boottime_ns,
        leads_session=status["NSsid"].split()[-1] == status["NSpid"].split()[-1],
        interval_timers=_interval_timers(leader, scratch),
        seat=processors_of(int(status["PPid"])),
    )


def _interval_timers(leader: Tracee, scratch: int) -> dict[int, bytes]:
    """The timers of setitimer and alarm that run, with the time that is left."""
    timers = {}
    for which in _INTERVAL_TIMERS:
        leader.call("getitimer", which, scratch)
        timer = leader.read(scratch, _ITIMER_BYTES)
        if any(timer[_ITIMER_BYTES // 2 :]):  # behind the interval stands what is left; nothing when it does not run
            timers[which] = timer
    return timers


def _signal_actions(leader: Tracee, scratch: int, chosen: int) -> dict[int, bytes]:
    """The actions of the signals in the mask ``chosen``, and of SIGCHLD, whose flags mean something by themselves."""
    actions = {}
    for number in range(1, _NUM_SIGNALS + 1):
        if number in _UNCATCHABLE or not (chosen >> (number - 1) & 1 or number == signal.SIGCHLD):
            continue
        leader.call("rt_sigaction", number, 0, scratch, 8)
        action = leader.read(scratch, _ACTION_BYTES)
        if any(action):
            actions[number] = action
    return actions


# --- threads ---


def capture_threads(frozen: Frozen, scratch: int) -> list[ThreadState]:
    """Every thread, the leader first."""
    return [_capture_thread(frozen.pid, tracee, scratch) for tracee in frozen.tracees]


def _capture_thread(pid: int, tracee: Tracee, scratch: int) -> ThreadState:
    registers = tracee.stopped_registers()
    rseq, rseq_bytes, rseq_signature = tracee.rseq()
    if rseq:
        registers = _out_of_critical_section(tracee, rseq, registers)
    robust_list, robust_list_bytes = get_robust_list(tracee.tid)
    tracee.call("prctl", PR_GET_TID_ADDRESS, scratch, 0, 0, 0)
    clear_child_tid = int.from_bytes(tracee.read(scratch, 8), "little")
    tracee.call("sigaltstack", 0, scratch)
    with open(f"/proc/{pid}/task/{tracee.tid}/comm") as file:
        name = file.read().rstrip("\n")
    return ThreadState(
        tid=inner_id(pid, tracee.tid),
        name=name,
        registers=registers,
        xstate=tracee.xstate(),
        signal_mask=tracee.stopped_signal_mask(),
        pending_signals=int(read_status(pid, tracee.tid)["SigPnd"], 16),
        robust_list=robust_list,
        robust_list_bytes=robust_list_bytes,
        clear_child_tid=clear_child_tid,
        rseq=rseq,
        rseq_bytes=rseq_bytes,
        rseq_signature=rseq_signature,
        signal_stack=tracee.read(scratch, _SIGNAL_STACK_BYTES),
        processors=processors_of(tracee.tid),
    )


def _out_of_critical_section(tracee: Tracee, rseq: int, registers: Registers) -> Registers:
    """A thread inside a restartable sequence goes on at its abort address, as after any preemption."""
    section = int.from_bytes(tracee.read(rseq + _RSEQ_CS_AT, 8), "little")
    if section:
        _, _, start, length, abort = _CRITICAL_SECTION.unpack(tracee.read(section, _CRITICAL_SECTION.size))
        if start <= registers["rip"] < start + length:
            return {**registers, "rip": abort, "orig_rax": (1 << 64) - 1}
    return registers


# --- memory ---


def capture_areas(pid: int, areas: list[Area], identities: Identities) -> AreasState:
    """The memory map, as read before `Frozen.prepare_calls` added an area, and the identities of mapped files."""
    files: dict[str, FileIdentity] = {}
    for area in areas:
        changes = area.kind is AreaKind.SHARED_FILE and "w" in area.protection
        if area.kind not in (AreaKind.PRIVATE_FILE, AreaKind.SHARED_FILE) or (area.path in files and not changes):
            continue
        if is_bound_by_the_site(area.path):
            continue
        seen = seen_from_here(pid, area.path)
        if changes:
            info = os.stat(seen)
            files[area.path] = FileIdentity(info.st_size, info.st_mtime_ns, "")
        else:
            files[area.path] = identities.of(seen)
    return AreasState(tuple(_area_state(area) for area in areas), files)


def _area_state(area: Area) -> AreaState:
    grows_down = area.path == "[stack]"
    return AreaState(area.start, area.end, area.protection, area.kind, area.offset, area.path, grows_down)


# --- open files ---


def capture_files(pid: int, identities: Identities) -> FilesState:
    """The open files, in order of number."""
    captured = _CapturedFiles(pid, identities)
    for descriptor in read_descriptors(pid):
        kind = kind_of(pid, descriptor)
        if kind is None:
            raise PeerError(f"dumping process {pid}: descriptor {descriptor.number} changed while it stood still")
        captured.states.append(_file_state(captured, descriptor, kind))
    return FilesState(tuple(captured.states), tuple(captured.nameless.values()))


@dataclass(frozen=True, slots=True)
class _CapturedFiles:
    """The descriptors up to now, and what later ones may lead to as well."""

    pid: int
    identities: Identities
    states: list[FileState] = field(default_factory=list)
    pipes: dict[str, int] = field(default_factory=dict)
    nameless: dict[tuple[int, int], NamelessFile] = field(default_factory=dict)  # by device and inode, in order


def _file_state(captured: _CapturedFiles, descriptor: Descriptor, kind: FileKind) -> FileState:
    pid, link, path = captured.pid, descriptor.link, f"/proc/{captured.pid}/fd/{descriptor.number}"
    same_as = next((state.number for state in captured.states if _share_position(pid, state, descriptor, kind)), None)
    data, content, nameless = b"", None, None
    if kind is FileKind.FILE and not is_bound_by_the_site(link):
        content = captured.identities.of(path)
    elif kind is FileKind.NAMELESS:
        info = os.stat(path)
        if (info.st_dev, info.st_ino) not in captured.nameless:
            captured.nameless[info.st_dev, info.st_ino] = describe_nameless(path, link)
        nameless = list(captured.nameless).index((info.st_dev, info.st_ino))
    elif kind is FileKind.PIPE and descriptor.flags & os.O_ACCMODE == os.O_RDONLY and same_as is None:
        data = _pipe_content(pid, descriptor.number)
    elif kind is FileKind.EVENT:
        data = int(dict(descriptor.info)["eventfd-count"], 16).to_bytes(8, "little")
    return FileState(
        number=descriptor.number,
        kind=kind,
        flags=descriptor.flags,
        path="" if kind in (FileKind.PIPE, FileKind.EVENT, FileKind.NAMELESS) else link,
        position=descriptor.position,
        content=content,
        same_as=same_as,
        pipe=captured.pipes.setdefault(link, len(captured.pipes) + 1) if kind is FileKind.PIPE else 0,
        data=data,
        nameless=nameless,
    )


def _share_position(pid: int, earlier: FileState, later: Descriptor, kind: FileKind) -> bool:
    if earlier.kind is not kind or earlier.same_as is not None:
        return False
    result = _libc.syscall(_KCMP, pid, pid, _KCMP_FILE, earlier.number, later.number)
    return bool(result == 0)


def _pipe_content(pid: int, number: int) -> bytes:
    """What is in a pipe, which stays there: ``tee`` copies it into a pipe of ours."""
    source = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    copy_out, copy_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        try:
            os.set_blocking(copy_in, False)
            count = system_call("tee", source, copy_in, 1 << 20, 2)
        except BlockingIOError:
            return b""
        return os.read(copy_out, count)
    finally:
        for descriptor in (source, copy_out, copy_in):
            os.close(descriptor)
