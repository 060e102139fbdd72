"""torch's recipe for distributed checkpoints, with the files of Remesh: two arguments name us, nothing else changes.

    python examples/integrations/dcp.py

Two ranks train under FSDP2 and save in the background with ``dcp.async_save``; three ranks load with ``dcp.load`` and
go on. The losses are those of the run that was never interrupted.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from remesh.integrations.dcp import DcpReader, DcpWriter

WIDTH, SAVED_AFTER, NUM_STEPS = 16, 3, 6
DATA = torch.randn(NUM_STEPS, 12, WIDTH, generator=torch.Generator().manual_seed(1))


class AppState(Stateful):
    """Model and optimizer, as in torch's recipe."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, object]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def work(rank: int, num_ranks: int, path: Path) -> None:
    """One rank of a job that trains from the beginning, or goes on where another has saved."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(path.with_name(f"rendezvous-{num_ranks}")), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = {"app": AppState(model, optimizer), "step": 0}
    group = dist.new_group()  # of saves in the background: training uses the other one meanwhile
    is_loaded = path.exists()
    if is_loaded:
        dcp.load(state, storage_reader=DcpReader(path))
    losses = []
    for step in range(state["step"], NUM_STEPS):
        loss = model(DATA[step]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if not is_loaded and step + 1 == SAVED_AFTER:
            state["step"] = step + 1
            saving = dcp.async_save(state, storage_writer=DcpWriter(path), process_group=group)
    if not is_loaded:
        saving.result()
    if rank == 0:
        last = ", ".join(f"{loss:.6f}" for loss in losses[SAVED_AFTER - NUM_STEPS :])
        print(f"{num_ranks} ranks, {'loaded' if is_loaded else 'trained'}: losses {last}")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        for num_ranks in (2, 3):
            mp.start_processes(work, (num_ranks, Path(root) / "checkpoint"), num_ranks, start_method="fork")


if __name__ == "__main__":
    main()
