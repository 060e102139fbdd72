"""One rank of the benchmark: its device, its group, a clock that waits for the device, and how large things are."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
_NUM_RUNS = 3


class NotRun(Exception):
    """This run cannot have the row; why. The same on all ranks."""


@dataclass
class Compared:
    """A measured row: beside what a user would run otherwise, and against what nobody can beat."""

    case: str = ""
    value: float | None = None
    peer: str = ""
    peer_value: float | None = None
    bound: str = ""
    bound_value: float | None = None
    not_run: str = ""

    def line(self) -> str:
        """The row as text."""
        if self.not_run:
            return f"{self.case:<42} not run: {self.not_run}"
        beside = [
            f"{name} {value:.4g}"
            for name, value in ((self.peer, self.peer_value), (self.bound, self.bound_value))
            if value is not None
        ]
        return f"{self.case:<42} {self.value:.4g} ({'; '.join(beside)})"


@dataclass
class BenchRank:
    """Where this process is."""

    device: torch.device
    rank: int
    world_size: int
    state_bytes: int
    """Of the state of a rank that is saved and loaded."""
    folder: Path = field(default_factory=Path)
    _num_folders: int = 0
    _network: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, device_type: str) -> BenchRank:
        """Make the group: NCCL for what is on devices, gloo for what is on the host."""
        if "RANK" not in os.environ:
            os.environ.update(_ALONE)
        device = torch.device("cpu")
        if device_type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
        size = 4 << 30 if device_type == "cuda" else 8 << 20
        return cls(device, dist.get_rank(), dist.get_world_size(), size)

    @property
    def is_small(self) -> bool:
        """Whether this only shows that the script works."""
        return self.device.type == "cpu"

    @property
    def device_name(self) -> str:
        return "CPU" if self.is_small else torch.cuda.get_device_name(self.device)

    @property
    def network(self) -> dist.ProcessGroup | None:
        """The group for what moves between devices: without a CPU backend, so that nothing goes through the host."""
        if self.is_small:
            return None
        if self._network is None:
            self._network = dist.new_group(backend="nccl", device_id=self.device)
        return self._network

    def seconds_into_folder(self, act: Callable[[Path], object]) -> float:
        """The same of what writes into a folder that is not there yet, and is gone afterwards."""
        taken = []
        for _ in range(_NUM_RUNS):
            taken.append(self._once(lambda: act(self.fresh_folder())))
            self.clear_folder()
        return min(taken)

    def clear_folder(self) -> None:
        """Remove all that was written: disks are small beside many saves. Called by all ranks."""
        dist.barrier()
        for path in self.folder.iterdir() if self.rank == 0 else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        dist.barrier()

    def fresh_folder(self) -> Path:
        """A place for something new, the same on all ranks."""
        self._num_folders += 1
        return self.folder / str(self._num_folders)

    def seconds(self, act: Callable[[], object]) -> float:
        """The shortest of some runs, each as long as the slowest rank takes, the device included."""
        return min(self._once(act) for _ in range(_NUM_RUNS))

    def _once(self, act: Callable[[], object]) -> float:
        self.settle()
        dist.barrier()
        begun_s = time.perf_counter()
        act()
        self.settle()
        taken = torch.tensor(time.perf_counter() - begun_s)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def settle(self) -> None:
        """Wait until the device has nothing to do."""
        if not self.is_small:
            torch.cuda.synchronize(self.device)
