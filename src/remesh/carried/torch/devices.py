"""Device memory of a program during an image: moved to host memory by NVIDIA's driver.

    withdraw     lock ──> checkpoint: what was on the device is memory of the process, which has no device any more
    give back    restore ──> unlock: it is on a device again, at the same addresses

A call may hang with the driver, so a process of its own makes them (`remesh.device.driver`) and reports each
step; the time limit counts from the last one. The program runs meanwhile: the driver needs its threads, and what calls
CUDA in between waits.

No device has run this; tests use a fake driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from remesh.carried.images import ImageRefusal, NotImageable, tree_of
from remesh.device.driver import LIBRARY, has_checkpoints
from remesh.foundation.errors import ConfigError
from remesh.foundation.linux.procfs import read_descriptors

DEVICE_PREFIX: Final = "/dev/nvidia"
"""How the names of NVIDIA's devices begin."""
_STEP_TIMEOUT_S: Final = 300.0
"""A step may copy all of a device: at 1 GB/s, 80 GB take 80 s."""


class DeviceMemory:
    """The device memory of one rank's program, as its keeper sees it."""

    def __init__(self) -> None:
        self._withdrawn: list[int] = []

    def withdraw(self, pid: int) -> list[str]:
        """Bring what a tree of processes has on devices into its own memory; returns the UUIDs of this host's devices.

        None of a tree that uses no device. Raises `NotImageable` when the driver refuses; `give_back` then undoes what
        was done.
        """
        self._withdrawn = _users_of_devices(pid)
        if not self._withdrawn:
            return []
        try:
            told = _ask_driver("withdraw", self._withdrawn)
        except ConfigError as error:
            raise NotImageable(f"imaging process {pid}", [ImageRefusal("its device memory", str(error))]) from error
        return list(told["devices"])

    def give_back(self) -> None:
        """Bring it back to the devices, if it was withdrawn. Raises `ConfigError` when the driver cannot."""
        withdrawn, self._withdrawn = self._withdrawn, []
        if withdrawn:
            _give_back(withdrawn, [])

    def restore(self, pid: int, devices: Sequence[str]) -> None:
        """The same for a tree that was restored from an image, where it had these devices.

        Those of this host take their places, in order. Raises `ConfigError` when the driver cannot.
        """
        if devices:
            _give_back(tree_of(pid), devices)


def can_withdraw() -> bool:
    """Whether this host has a driver that can bring device memory into the host's."""
    try:
        return has_checkpoints(ctypes.CDLL(LIBRARY))
    except OSError:
        return False


def _users_of_devices(pid: int) -> list[int]:
    found = []
    for each in tree_of(pid):
        try:
            uses = any(descriptor.link.startswith(DEVICE_PREFIX) for descriptor in read_descriptors(each))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if uses:
            found.append(each)
    return found


def _give_back(pids: Sequence[int], devices: Sequence[str]) -> None:
    doing, hint = (
        "bringing device memory back",
        "restart the job from its last checkpoint, under the driver that took it",
    )
    try:
        told = _ask_driver("give-back", pids, devices)
    except ConfigError as error:
        raise ConfigError(f"{doing}: {error}; {hint}") from error
    if devices and not told["num_restored"]:
        raise ConfigError(f"{doing}: the driver knows of none in these processes, expected that of the image; {hint}")


def _ask_driver(what: str, pids: Sequence[int], devices: Sequence[str] = ()) -> dict[str, Any]:
    """Let a process of its own ask the driver; returns its last word. Raises `ConfigError` when that is a problem."""
    command = [sys.executable, "-m", "remesh.device.driver", what, *map(str, pids)]
    for device in devices:
        command += ["--device", device]
    # The program may see some devices only; pairs of old and new ones are of all.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    last: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment) as asked:
        try:
            for line in _lines_of(asked):
                last = json.loads(line)
        except BaseException:
            asked.kill()
            raise
    if "problem" in last:
        raise ConfigError(last["problem"])
    if not last.get("done"):
        raise ConfigError(f"the process that asked NVIDIA's driver ended with status {asked.returncode} on the way")
    return last


def _lines_of(asked: subprocess.Popen[bytes]) -> Iterator[bytes]:
    assert asked.stdout is not None
    found, last_s = b"", time.monotonic()
    while True:
        ready, _, _ = select.select([asked.stdout], [], [], max(0.0, last_s + _STEP_TIMEOUT_S - time.monotonic()))
        if not ready:
            raise ConfigError(f"NVIDIA's driver got nowhere for {_STEP_TIMEOUT_S:.0f} s; see what `nvidia-smi` shows")
        new = os.read(asked.stdout.fileno(), 1 << 16)
        if not new:
            return
        last_s = time.monotonic()
        *lines, found = (found + new).split(b"\n")
        yield from lines
