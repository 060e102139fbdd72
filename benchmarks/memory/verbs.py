"""The verbs, each with a state that a rank makes for it: bytes planned, and bytes measured while it went on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import remesh
from benchmarks.memory.peaks import peak_of
from remesh.checkpoint.storage.checked_file import NUM_READERS, WINDOW_BYTES
from remesh.comm.gather import group_device
from remesh.elasticity.training.fill import FillRules, Offers, fill_state
from remesh.elasticity.training_state import CarriedState
from remesh.resharding import Target

NUM_TENSORS = 16
_WINDOWS = 8
"""A window has so many parts of a state."""
_ADAM = 3
"""Parts of a state that Adam keeps: parameters, and two moments of each."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank, and how much it is to hold."""

    device: torch.device
    state_bytes: int
    """Of its part of the state. Invariant: tensors of it are whole numbers of elements."""
    folder: Path
    mesh: DeviceMesh
    """All ranks in a row."""

    @property
    def side(self) -> int:
        """Rows and columns of each of the tensors."""
        elements = self.state_bytes // NUM_TENSORS // 4 * dist.get_world_size()
        size = dist.get_world_size()
        return int(elements**0.5) // size * size

    def state(self, dim: int = 0) -> dict[str, torch.Tensor]:
        """This rank's rows, or columns, of every tensor."""
        return {f"t{number}": self.tensor(dim) for number in range(NUM_TENSORS)}

    def tensor(self, dim: int) -> torch.Tensor:
        """This rank's rows, or columns, of one."""
        size = dist.get_world_size()
        shape = (self.side // size, self.side) if dim == 0 else (self.side, self.side // size)
        return DTensor.from_local(torch.ones(shape, device=self.device), self.mesh, [Shard(dim)], run_check=False)

    @property
    def bytes(self) -> int:
        """Of the state as it is."""
        return NUM_TENSORS * self.side * self.side * 4 // dist.get_world_size()

    def on_device(self, staging_bytes: int) -> int:
        """As much of the staging as lies where the state does: with gloo it is on the host."""
        return staging_bytes if group_device().type == self.device.type else 0


@dataclass(frozen=True, slots=True)
class Told:
    """Bytes of one verb on one rank, the state among them."""

    planned: int
    measured: int


def reshard(place: Place) -> Told:
    """From rows to columns: both, and staging."""
    with peak_of(place.device) as peak:
        moved = remesh.reshard(place.state(), place.state(1))
    return Told(2 * place.bytes + place.on_device(moved.planned_staging_bytes), peak.bytes)


def by_windows(place: Place) -> Told:
    """The same, a few tensors at a time, with as much staging as a window."""
    window_bytes = place.bytes // _WINDOWS
    with peak_of(place.device) as peak:
        give, came = place.state(), dict[str, DTensor]()
        windows = remesh.reshard_by_windows(
            give, to=Target(place.mesh, [Shard(1)]), window_bytes=window_bytes, max_staging_bytes=window_bytes
        )
        for made in windows:
            came |= made
    return Told(windows.peak_bytes + place.on_device(window_bytes), peak.bytes)


def save(place: Place) -> Told:
    """Straight from the state's own memory."""
    with peak_of(place.device) as peak:
        remesh.save(place.state(), place.folder / "saved")
    return Told(place.bytes, peak.bytes)


def save_in_background(place: Place) -> Told:
    """The state, and a copy of it on the host."""
    with peak_of(place.device) as peak:
        remesh.save(place.state(), place.folder / "background", background=True).result()
    return Told(place.bytes * (1 if place.device.type == "cuda" else 2), peak.bytes)


def load(place: Place) -> Told:
    """Columns of what was saved in rows: what is filled, and a window for each that reads."""
    remesh.save(place.state(), place.folder / "loaded")
    with peak_of(place.device) as peak:
        remesh.load(place.state(1), place.folder / "loaded")
    return Told(place.bytes + (0 if place.device.type == "cuda" else (1 + NUM_READERS) * WINDOW_BYTES), peak.bytes)


def refit(place: Place, *, in_place: bool = False) -> Told:
    """What the trainer holds, two buffers of what the generator reads, and staging."""
    with peak_of(place.device) as peak:
        refit = remesh.Refit(place.state(1), in_place=in_place)
        moved = refit.push(place.state(), 1)
    planned = (2 if in_place else 3) * place.bytes + place.on_device(moved.planned_staging_bytes)
    return Told(planned, peak.bytes)


def refit_in_place(place: Place) -> Told:
    """The same with one buffer."""
    return refit(place, in_place=True)


def carry_by_windows(place: Place) -> Told:
    """Parameters and their Adam, as `job.carry` fills a new mesh: the old state, new parameters, a window; and
    beside it as much for staging and for the gradients of the empty step."""
    hosts = dict.fromkeys(range(dist.get_world_size()), "here")

    def state(dim: int) -> CarriedState:
        model = nn.ParameterList(nn.Parameter(place.tensor(dim)) for _ in range(NUM_TENSORS // _ADAM))
        return CarriedState({"model": model, "optim": torch.optim.Adam(model.parameters(), foreach=False)})

    window_bytes = place.bytes // _WINDOWS
    with peak_of(place.device) as peak:
        old = state(0)
        old.allocate({"optim.state.model.0.exp_avg"})
        held = old.hold(1, 1, 0)
        del old
        filled = fill_state(state(1), Offers(held), hosts, FillRules(window_bytes=window_bytes))
    return Told(filled.peak_bytes + window_bytes + place.on_device(window_bytes), peak.bytes)


VERBS: dict[str, Callable[[Place], Told]] = {
    "reshard": reshard,
    "reshard by windows": by_windows,
    "save": save,
    "save in the background": save_in_background,
    "load in another layout": load,
    "Refit": refit,
    "Refit in place": refit_in_place,
    "job.carry by windows": carry_by_windows,
}


def measure(verb: str, state_bytes: int, folder: Path, device_type: str) -> Told:
    """One verb on this rank; every rank of the default group calls it. Once before, so that what stays is there."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    mesh = DeviceMesh(device_type, range(dist.get_world_size()))
    VERBS[verb](Place(device, 1 << 20, folder / "first", mesh))
    return VERBS[verb](Place(device, state_bytes, folder / "second", mesh))
