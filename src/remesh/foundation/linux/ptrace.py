"""Tracees (ptrace): threads of other processes, stopped, read, changed, and made to perform system calls.

A *tracee* is a thread that this thread traces. An *injected call* sets its registers so that its next instruction is
``syscall``, wherever such an instruction lies in its memory, and lets it step once. Three details make that safe: all
its signals are blocked meanwhile, or a pending one would appear as another stop; ``orig_rax`` is -1, or the kernel
would restart the call that the tracee was in when it was stopped; registers and mask are put back by `Tracee.settle`.
Source: ptrace(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
from collections.abc import Callable, Mapping
from typing import Final

from remesh.foundation.errors import PeerError
from remesh.foundation.linux.calls import SYS, IoVec, ptrace

_CONT: Final = 7
_SINGLESTEP: Final = 9
_DETACH: Final = 17
_SETOPTIONS: Final = 0x4200
_GETEVENTMSG: Final = 0x4201
_GETREGSET: Final = 0x4204
_SETREGSET: Final = 0x4205
_SEIZE: Final = 0x4206
_INTERRUPT: Final = 0x4207
_GETSIGMASK: Final = 0x420A
_SETSIGMASK: Final = 0x420B
_GET_RSEQ_CONFIGURATION: Final = 0x420F

OPTION_TRACE_FORK: Final = 0x2
OPTION_TRACE_CLONE: Final = 0x8
OPTION_TRACE_EXEC: Final = 0x10
OPTION_EXIT_KILL: Final = 0x100000
_EVENT_FORK: Final = 1
_EVENT_CLONE: Final = 3
_EVENT_EXEC: Final = 4
_EVENT_STOP: Final = 128
_NT_PRSTATUS: Final = 1
_NT_X86_XSTATE: Final = 0x202
_XSTATE_ROOM_BYTES: Final = 16384
_ALL_THREADS: Final = 0x40000000  # __WALL
_ALL_SIGNALS: Final = (1 << 64) - 1
_MAX_ERRNO: Final = 4095
_MAX_STRAY_STOPS: Final = 64
"""Limit of stops for other reasons while waiting for a certain one."""

REGISTERS: Final = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
"""``struct user_regs_struct``: 27 words of 64 bits, in this order."""
_REGISTERS_FORM: Final = struct.Struct(f"<{len(REGISTERS)}Q")
_ARGUMENTS: Final = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
SYSCALL_INSTRUCTION: Final = b"\x0f\x05"

Registers = dict[str, int]


class Tracee:
    """One thread that is held. ``tid`` is its id as this process sees it."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self._memory: int | None = None
        self._registers: Registers = {}  # as they were when it was stopped
        self._mask = 0
        self._syscall_address = 0

    # --- holding it ---

    def seize(self) -> None:
        """Begin to trace the thread, without stopping it."""
        ptrace(_SEIZE, self.tid)

    def interrupt(self) -> None:
        """Stop the thread wherever it is; returns when it stands. Signals on their way to it are delivered first."""
        ptrace(_INTERRUPT, self.tid)
        for _ in range(_MAX_STRAY_STOPS):
            status = self._wait()
            if status >> 16 == _EVENT_STOP:
                return
            ptrace(_CONT, self.tid, data=os.WSTOPSIG(status))
        raise PeerError(f"stopping thread {self.tid}: it was given {_MAX_STRAY_STOPS} signals meanwhile; try again")

    def wait_until_stopped(self) -> None:
        """Wait for a stop of any kind, as of a child that asked to be traced or a thread just made."""
        self._wait()

    def wait_until_gone(self) -> None:
        """Wait for the end of a thread that was killed."""
        with contextlib.suppress(ChildProcessError):
            while os.WIFSTOPPED(os.waitpid(self.tid, _ALL_THREADS)[1]):
                pass

    def set_options(self, options: int) -> None:
        """Set options of the trace; see the ``OPTION_`` constants."""
        ptrace(_SETOPTIONS, self.tid, data=options)

    def detach(self) -> bool:
        """Let the thread run on, with its registers as they were set; returns False if it was killed meanwhile.

        Such a thread must be waited for, or nobody else is told of its end.
        """
        try:
            ptrace(_DETACH, self.tid)
        except ProcessLookupError:
            return False
        return True

    def _wait(self) -> int:
        _, status = os.waitpid(self.tid, _ALL_THREADS)
        if not os.WIFSTOPPED(status):
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
            raise PeerError(f"holding thread {self.tid}: it ended with {how}; start again from the last image")
        return status

    # --- reading and changing it ---

    def registers(self) -> Registers:
        """The general registers, by name."""
        return dict(zip(REGISTERS, _REGISTERS_FORM.unpack(self._get_regset(_NT_PRSTATUS, 27 * 8)), strict=True))

    def set_registers(self, registers: Mapping[str, int]) -> None:
        """Set all 27 registers, see `REGISTERS`."""
        self._set_regset(_NT_PRSTATUS, _REGISTERS_FORM.pack(*(registers[name] for name in REGISTERS)))

    def xstate(self) -> bytes:
        """The extended state (vector and floating point registers) in the processor's own form."""
        return self._get_regset(_NT_X86_XSTATE, _XSTATE_ROOM_BYTES)

    def set_xstate(self, state: bytes) -> None:
        """Set the extended state, as `xstate` gave it."""
        self._set_regset(_NT_X86_XSTATE, state)

    def signal_mask(self) -> int:
        """The blocked signals, bit n-1 for signal n."""
        mask = ctypes.c_uint64()
        ptrace(_GETSIGMASK, self.tid, 8, ctypes.addressof(mask))
        return mask.value

    def set_signal_mask(self, mask: int) -> None:
        """Set the blocked signals; see `signal_mask`."""
        value = ctypes.c_uint64(mask)
        ptrace(_SETSIGMASK, self.tid, 8, ctypes.addressof(value))

    def rseq(self) -> tuple[int, int, int]:
        """Address, size and signature of the thread's restartable-sequence area; zeros when it has none."""
        words = (ctypes.c_uint32 * 6)()
        ptrace(_GET_RSEQ_CONFIGURATION, self.tid, 24, ctypes.addressof(words))
        return words[0] | words[1] << 32, words[2], words[3]

    def read(self, address: int, num_bytes: int) -> bytes:
        """Read bytes of the thread's memory."""
        return os.pread(self._open_memory(), num_bytes, address)

    def write(self, address: int, data: bytes) -> None:
        """Put bytes into the thread's memory, also where it may not write itself."""
        if os.pwrite(self._open_memory(), data, address) != len(data):
            raise OSError(errno.EFAULT, f"writing {len(data)} bytes at {address:#x} of thread {self.tid}")

    def memory_descriptor(self) -> int:
        """The thread's memory as a file of this process, good until `close`."""
        return self._open_memory()

    def close(self) -> None:
        """Close the file that `memory_descriptor` opened."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _open_memory(self) -> int:
        if self._memory is None:
            self._memory = os.open(f"/proc/{self.tid}/mem", os.O_RDWR | os.O_CLOEXEC)
        return self._memory

    def _get_regset(self, kind: int, room_bytes: int) -> bytes:
        room = ctypes.create_string_buffer(room_bytes)
        vector = IoVec(ctypes.addressof(room), room_bytes)
        ptrace(_GETREGSET, self.tid, kind, ctypes.addressof(vector))
        return room.raw[: vector.length]

    def _set_regset(self, kind: int, data: bytes) -> None:
        room = ctypes.create_string_buffer(data, len(data))
        vector = IoVec(ctypes.addressof(room), len(data))
        ptrace(_SETREGSET, self.tid, kind, ctypes.addressof(vector))

    # --- injected calls ---

    def prepare(self, syscall_address: int) -> None:
        """Get ready for injected calls; ``syscall_address`` is where a `SYSCALL_INSTRUCTION` lies in its memory."""
        self._registers = self.registers()
        self._mask = self.signal_mask()
        self._syscall_address = syscall_address
        self.set_signal_mask(_ALL_SIGNALS)

    def use_instruction_at(self, syscall_address: int) -> None:
        """From now on inject by another `SYSCALL_INSTRUCTION`."""
        self._syscall_address = syscall_address

    def settle(self) -> None:
        """Put back the registers and the signal mask of the time of `prepare`."""
        self.set_registers(self._registers)
        self.set_signal_mask(self._mask)

    def stopped_registers(self) -> Registers:
        """The registers at the time of `prepare`."""
        return dict(self._registers)

    def stopped_signal_mask(self) -> int:
        """The signal mask at the time of `prepare`."""
        return self._mask

    def call(self, name: str, *args: int) -> int:
        """Make the thread perform a system call of `SYS`; returns its result. Raises `OSError` as the call would."""
        self._set_up_call(name, args)
        ptrace(_SINGLESTEP, self.tid)
        self._wait_for_step()
        return self._result(name)

    def call_clone(self, name: str, *args: int) -> int:
        """Make a call, as `call` does, that makes a thread or process; returns its id as this process sees it.

        Needs `OPTION_TRACE_CLONE`, and `OPTION_TRACE_FORK` where its end raises SIGCHLD.
        """
        self._set_up_call(name, args)
        ptrace(_SINGLESTEP, self.tid)
        status = self._wait()
        if status >> 8 == signal.SIGTRAP:  # it returned without a clone
            return self._result(name)
        if status >> 8 not in (signal.SIGTRAP | _EVENT_CLONE << 8, signal.SIGTRAP | _EVENT_FORK << 8):
            raise PeerError(f"making a thread in {self.tid}: unexpected stop {status:#x}; start again from the image")
        tid = ctypes.c_ulong()
        ptrace(_GETEVENTMSG, self.tid, data=ctypes.addressof(tid))
        ptrace(_SINGLESTEP, self.tid)
        self._wait_for_step()
        return tid.value

    def call_exec(self, path: int, arguments: int, environment: int) -> None:
        """Make the thread execute a program; it stands at the beginning of that. Needs `OPTION_TRACE_EXEC`."""
        self._set_up_call("execve", (path, arguments, environment))
        ptrace(_SINGLESTEP, self.tid)
        status = self._wait()
        if status >> 8 == signal.SIGTRAP:
            self._result("execve")
        if status >> 8 != signal.SIGTRAP | _EVENT_EXEC << 8:
            raise PeerError(f"executing in {self.tid}: unexpected stop {status:#x}; start again from the image")
        ptrace(_SINGLESTEP, self.tid)
        self._wait_for_step()
        self.close()  # the file of its old memory

    def call_last(self, name: str, *args: int) -> None:
        """Make the thread perform a call that it does not come back from."""
        self._set_up_call(name, args)
        self.close()
        ptrace(_CONT, self.tid)
        self.wait_until_gone()

    def die_by(self, number: int) -> None:
        """End the thread by a signal."""
        self.set_signal_mask(0)
        self.close()
        ptrace(_CONT, self.tid, data=number)
        self.wait_until_gone()

    def _set_up_call(self, name: str, args: tuple[int, ...]) -> None:
        registers = dict(self._registers)
        registers.update(rip=self._syscall_address, rax=SYS[name], orig_rax=_ALL_SIGNALS)
        registers.update(zip(_ARGUMENTS, (arg & _ALL_SIGNALS for arg in args), strict=False))
        self.set_registers(registers)

    def _wait_for_step(self) -> None:
        for _ in range(_MAX_STRAY_STOPS):
            status = self._wait()
            if status >> 8 == signal.SIGTRAP:
                return
            ptrace(_SINGLESTEP, self.tid)
        raise PeerError(f"a call in thread {self.tid} did not come to its end; start again from the last image")

    def _result(self, name: str) -> int:
        value = self.registers()["rax"]
        if value > _ALL_SIGNALS - _MAX_ERRNO:
            number = _ALL_SIGNALS + 1 - value
            raise OSError(number, f"{name} in thread {self.tid}: {os.strerror(number)}")
        return value


def find_instruction(read: Callable[[int, int], bytes], start: int, end: int) -> int | None:
    """Find a `SYSCALL_INSTRUCTION` in ``[start, end)`` of a memory that ``read(address, num_bytes)`` reads."""
    at = read(start, end - start).find(SYSCALL_INSTRUCTION)
    return start + at if at >= 0 else None
