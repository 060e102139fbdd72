"""Capture of a frozen process's kernel state: from ``/proc``, from ptrace, and by injected system calls."""

from __future__ import annotations

import os
import resource
import signal
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from remesh.carried.images.form.clocks import clocks_of
from remesh.carried.images.form.format import (
    AreasState,
    AreaState,
    FileIdentity,
    MemoryBounds,
    ProcessState,
    ThreadState,
)
from remesh.carried.images.form.identity import Identities
from remesh.carried.images.look.affinity import processors_of
from remesh.carried.images.look.attributes import LIMITS, OF_PROCESSES, OF_THREADS, read_attributes
from remesh.carried.images.look.frozen_process import FrozenProcess
from remesh.carried.images.look.inspection import is_bound_by_the_site
from remesh.foundation.linux.calls import (
    PR_GET_CHILD_SUBREAPER,
    PR_GET_DEATH_SIGNAL,
    PR_GET_TID_ADDRESS,
    PR_GET_TIMER_SLACK,
    get_robust_list,
)
from remesh.foundation.linux.proc_text import Area, AreaKind
from remesh.foundation.linux.procfs import inner_id, read_stat, read_status, seen_from_here
from remesh.foundation.linux.ptrace import Registers, Tracee

_NUM_SIGNALS: Final = 64
_UNCATCHABLE: Final = (9, 19)
_ACTION_BYTES: Final = 32
_SIGNAL_STACK_BYTES: Final = 24
_ITIMER_BYTES: Final = 32
_INTERVAL_TIMERS: Final = (0, 1, 2)  # ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF
_RSEQ_CS_AT: Final = 8  # of the pointer to the critical section, in struct rseq
_CRITICAL_SECTION: Final = struct.Struct("<2I3Q")  # version, flags, start, length, abort address
_PR_GET_DUMPABLE: Final = 3


# --- process ---


def capture_process(process: FrozenProcess, scratch: int, seat: int) -> ProcessState:
    """Read the state that a process has once; ``affinity`` are the processors that its tree was given."""
    pid, leader = process.pid, process.leader
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
        limits={number: resource.prlimit(pid, number) for number in LIMITS},
        dumpable=leader.call("prctl", _PR_GET_DUMPABLE, 0, 0, 0, 0) == 1,
        monotonic_ns=clocks.monotonic_ns,
        boottime_ns=clocks.boottime_ns,
        is_subreaper=_asked(leader, scratch, PR_GET_CHILD_SUBREAPER) != 0,
        death_signal=_asked(leader, scratch, PR_GET_DEATH_SIGNAL),
        interval_timers=_interval_timers(leader, scratch),
        attributes=read_attributes(OF_PROCESSES, pid),
        seat=seat,
    )


def _asked(leader: Tracee, scratch: int, option: int) -> int:
    """A property that prctl writes to memory, as an int of C."""
    leader.call("prctl", option, scratch, 0, 0, 0)
    return int.from_bytes(leader.read(scratch, 4), "little")


def _interval_timers(leader: Tracee, scratch: int) -> dict[int, bytes]:
    """The timers of setitimer and alarm that run, with the time that is left."""
    timers = {}
    for which in _INTERVAL_TIMERS:
        leader.call("getitimer", which, scratch)
        timer = leader.read(scratch, _ITIMER_BYTES)
        interval, left = timer[: _ITIMER_BYTES // 2], timer[_ITIMER_BYTES // 2 :]
        if any(timer):
            # One with an interval and nothing left has expired while the process stood, and begins anew once its
            # signal, which is pending, is delivered.
            timers[which] = interval + (left if any(left) else interval)
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


def capture_threads(process: FrozenProcess, scratch: int) -> list[ThreadState]:
    """Every thread, the leader first."""
    return [_capture_thread(process.pid, tracee, scratch) for tracee in process.tracees]


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
    status = read_status(pid, tracee.tid)
    return ThreadState(
        tid=inner_id(pid, tracee.tid),
        name=name,
        registers=registers,
        xstate=tracee.xstate(),
        signal_mask=tracee.stopped_signal_mask(),
        pending_signals=int(status["SigPnd"], 16),
        robust_list=robust_list,
        robust_list_bytes=robust_list_bytes,
        clear_child_tid=clear_child_tid,
        rseq=rseq,
        rseq_bytes=rseq_bytes,
        rseq_signature=rseq_signature,
        signal_stack=tracee.read(scratch, _SIGNAL_STACK_BYTES),
        processors=processors_of(tracee.tid),
        attributes=read_attributes(OF_THREADS, tracee.tid),
        timer_slack_ns=tracee.call("prctl", PR_GET_TIMER_SLACK, 0, 0, 0, 0),
        no_new_privs=status["NoNewPrivs"] == "1",
    )


def _out_of_critical_section(tracee: Tracee, rseq: int, registers: Registers) -> Registers:
    """The registers of a thread; in a restartable sequence it goes on at its abort address, as after preemption."""
    section = int.from_bytes(tracee.read(rseq + _RSEQ_CS_AT, 8), "little")
    if section:
        _, _, start, length, abort = _CRITICAL_SECTION.unpack(tracee.read(section, _CRITICAL_SECTION.size))
        if start <= registers["rip"] < start + length:
            return {**registers, "rip": abort, "orig_rax": (1 << 64) - 1}
    return registers


# --- memory ---


def capture_areas(
    areas: list[Area], files: dict[str, FileIdentity], number_of_carried: Callable[[tuple[str, int]], int]
) -> AreasState:
    """The memory map, as read before `FrozenProcess.prepare_calls` added an area, with the mapped ``files``.

    ``number_of_carried`` returns which carried file of the tree has a device and inode.
    """
    return AreasState(tuple(_area_state(area, number_of_carried) for area in areas), files)


def mapped_files(
    pid: int, areas: list[Area], identities: Identities, written: Mapping[str, FileIdentity]
) -> dict[str, FileIdentity]:
    """Compute the identities of mapped files, by path; those of ``written`` ones are known."""
    return {path: written.get(path) or identities.of(seen) for path, seen in mapped_paths(pid, areas).items()}


def mapped_paths(pid: int, areas: Iterable[Area]) -> dict[str, str]:
    """Where the mapped files of a process are seen from here, by path."""
    kinds = (AreaKind.PRIVATE_FILE, AreaKind.SHARED_FILE)
    paths = (area.path for area in areas if area.kind in kinds and not is_bound_by_the_site(area.path))
    return {path: seen_from_here(pid, path) for path in paths}


def _area_state(area: Area, number_of_carried: Callable[[tuple[str, int]], int]) -> AreaState:
    carried = number_of_carried((area.device, area.inode)) if area.kind is AreaKind.CARRIED else None
    grows_down = area.path == "[stack]"
    return AreaState(area.start, area.end, area.protection, area.kind, area.offset, area.path, grows_down, carried)
