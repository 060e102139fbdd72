"""``python -m remesh.device.driver withdraw|give-back PID...``: what NVIDIA's driver does for images.

The driver takes and gives it for a whole process, from outside: the group CUDA_CHECKPOINT of its API, in version 570 or
newer. The driver, and not Remesh, knows which step a process has come to: so each direction may be asked for again,
from wherever the last one ended. A line of JSON reports each step; the last one may be a problem.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final

from remesh.foundation.errors import ConfigError

LIBRARY: Final = "libcuda.so.1"
_CALLS: Final = ("Lock", "Checkpoint", "Restore", "Unlock", "GetState")
_LOCK_MS: Final = 10_000


class _DriverState(IntEnum):
    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class _LockArgs(ctypes.Structure):
    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class _GpuPair(ctypes.Structure):
    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class _RestoreArgs(ctypes.Structure):
    _fields_ = (
        ("pairs", ctypes.POINTER(_GpuPair)),
        ("num_pairs", ctypes.c_uint),
        ("reserved", ctypes.c_char * (52 - ctypes.sizeof(ctypes.c_void_p))),
        ("reserved1", ctypes.c_uint64),
    )


def has_checkpoints(library: ctypes.CDLL) -> bool:
    """Whether a driver's library has what is called here."""
    return all(hasattr(library, f"cuCheckpointProcess{name}") for name in _CALLS)


class _Driver:
    """NVIDIA's driver. Its methods raise `ConfigError` with its word."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise ConfigError(f"{LIBRARY} cannot be loaded ({error}); expected NVIDIA's driver on this host") from error
        if not has_checkpoints(self._library):
            raise ConfigError("NVIDIA's driver has no checkpoints, expected version 570 or newer; update it")
        self._call("cuInit", "starting to use NVIDIA's driver", 0)

    def state_of(self, pid: int) -> _DriverState | None:
        """None for a process that does not use CUDA."""
        state = ctypes.c_int()
        if self._library.cuCheckpointProcessGetState(pid, ctypes.byref(state)):
            return None
        return _DriverState(state.value)

    def lock(self, pid: int) -> None:
        """Have what the process calls of CUDA wait, and end what it has queued."""
        self._call("cuCheckpointProcessLock", "locking the device memory", pid, ctypes.byref(_LockArgs(_LOCK_MS)))

    def checkpoint(self, pid: int) -> None:
        """Bring device memory into the process; it is locked."""
        self._call("cuCheckpointProcessCheckpoint", "bringing device memory to the host", pid, None)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        """Bring it back, onto the second device of each pair what was on the first; it is locked then."""
        made = (_GpuPair * len(pairs))(*(_GpuPair(_uuid(old), _uuid(new)) for old, new in pairs))
        words = ctypes.byref(_RestoreArgs(made, len(pairs))) if pairs else None
        self._call("cuCheckpointProcessRestore", "bringing device memory back", pid, words)

    def unlock(self, pid: int) -> None:
        """Let calls of CUDA go on."""
        self._call("cuCheckpointProcessUnlock", "unlocking the device memory", pid, None)

    def devices(self) -> list[str]:
        """The UUIDs of this host's devices, in the driver's order, in hex."""
        count, found = ctypes.c_int(), []
        self._call("cuDeviceGetCount", "counting devices", ctypes.byref(count))
        for number in range(count.value):
            device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            self._call("cuDeviceGet", f"looking at device {number}", ctypes.byref(device), number)
            self._call("cuDeviceGetUuid", f"looking at device {number}", ctypes.byref(uuid), device)
            found.append(bytes(uuid).hex())
        return found

    def _call(self, name: str, doing: str, *words: object) -> None:
        code = getattr(self._library, name)(*words)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"no reason").decode(errors="replace")
            of_whom = f" of process {words[0]}" if name.startswith("cuCheckpoint") else ""
            raise ConfigError(f"{doing}{of_whom}: {name} gave {code} ({reason})")


def _uuid(text: str) -> Any:
    return (ctypes.c_ubyte * 16)(*bytes.fromhex(text))


def _withdraw(driver: _Driver, pids: Sequence[int], tell: Callable[[dict[str, Any]], None]) -> None:
    """All are locked before the first one loses its device: they may wait for each other."""
    for pid in pids:
        state = driver.state_of(pid)
        if state in (None, _DriverState.FAILED):
            raise ConfigError(f"process {pid} has a device open, and NVIDIA's driver can take no checkpoint of it")
        if state is _DriverState.RUNNING:
            driver.lock(pid)
            tell({"locked": pid})
    for pid in pids:
        if driver.state_of(pid) is _DriverState.LOCKED:
            driver.checkpoint(pid)
            tell({"withdrawn": pid})
    tell({"done": True, "devices": driver.devices()})


def _restore_all(
    driver: _Driver, pids: Sequence[int], devices: Sequence[str], tell: Callable[[dict[str, Any]], None]
) -> None:
    """Take each of the processes to where it runs, from wherever it stands."""
    here, num_restored = driver.devices(), 0
    if devices and len(devices) > len(here):
        raise ConfigError(f"expected {len(devices)} devices, as where the checkpoint was taken, found {len(here)}")
    pairs = [] if not devices or devices == here[: len(devices)] else list(zip(devices, here, strict=False))
    for pid in pids:
        if driver.state_of(pid) is _DriverState.FAILED:
            raise ConfigError(f"NVIDIA's driver has given process {pid} up")
        if driver.state_of(pid) is _DriverState.CHECKPOINTED:
            driver.restore(pid, pairs)
            num_restored += 1
            tell({"restored": pid})
    for pid in pids:
        if driver.state_of(pid) is _DriverState.LOCKED:
            driver.unlock(pid)
            tell({"unlocked": pid})
    tell({"done": True, "num_restored": num_restored})


def _main() -> None:
    parser = argparse.ArgumentParser(prog="remesh.device.driver")
    parser.add_argument("what", choices=("withdraw", "give-back"))
    parser.add_argument("pids", type=int, nargs="+")
    parser.add_argument("--device", action="append", default=[], help="UUID of a device of the image, in order")
    asked = parser.parse_args()

    def tell(step: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(step) + "\n")
        sys.stdout.flush()

    try:
        driver = _Driver()
        if asked.what == "withdraw":
            _withdraw(driver, asked.pids, tell)
        else:
            _restore_all(driver, asked.pids, asked.device, tell)
    except ConfigError as error:
        tell({"problem": str(error)})


if __name__ == "__main__":
    _main()
