"""Checkpoints as a user of torch DCP writes them: FSDP2 x TP is saved, and another mesh goes on from there.

    python examples/checkpoint/plain.py

Four ranks train a small model under FSDP2 x TP and save model, optimizer, scheduler, position in the data and the state
of each rank's random numbers. The same four ranks, then two ranks under FSDP2 alone, load it; the losses of the next
steps are those of a run that was never interrupted.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import remesh
from remesh.dist_checkpointing import load_tensors_metadata
from remesh.layout import Box, Shard
from remesh.layout.from_torch import Piece

WIDTH, BATCH, SAVED_AFTER, NUM_STEPS = 16, 8, 3, 5
DATA = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        for job, mesh_shape in enumerate(((2, 2), (2, 2), (2,))):
            num_ranks = torch.Size(mesh_shape).numel()
            mp.start_processes(work, (job, mesh_shape, Path(root)), num_ranks, start_method="fork")


def work(rank: int, job: int, mesh_shape: tuple[int, ...], root: Path) -> None:
    """One rank of a job that trains from the beginning, or goes on where another has saved."""
    torch.set_num_threads(1)
    num_ranks = torch.Size(mesh_shape).numel()
    store = dist.FileStore(str(root / f"rendezvous-{job}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    run = Run(mesh_shape)
    newest = remesh.latest_complete(root)
    if newest is not None:
        run.load(newest)
    losses = []
    while run.position < NUM_STEPS * BATCH:
        losses.append(run.step())
        if newest is None and run.position == SAVED_AFTER * BATCH:
            remesh.save(run.state(), root / "step-00000003")
    if rank == 0:
        after = ", ".join(f"{loss:.6f}" for loss in losses[-(NUM_STEPS - SAVED_AFTER) :])
        print(f"mesh {'x'.join(map(str, mesh_shape))}, {'trained' if newest is None else 'loaded'}: losses {after}")
    dist.destroy_process_group()


class Run:
    """A model, what trains it, and where it is in the data."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(self.model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=NUM_STEPS)
        self.position = 0
        self.random = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> float:
        """Train on the next samples; the loss before. All ranks see all of them, so that meshes can be compared."""
        batch = DATA[self.position : self.position + BATCH]
        loss = (self.model(batch) - batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.position += BATCH
        return loss.item()

    def state(self) -> dict:
        """All there is to save. Optimizer states stand under the names of parameters, whatever their order."""
        names = [name for name, _ in self.model.named_parameters()]
        optimizer = self.optimizer.state_dict()
        return {
            "model": self.model.state_dict(),
            "optimizer": {names[number]: of_parameter for number, of_parameter in optimizer["state"].items()},
            "groups": optimizer["param_groups"],
            "scheduler": self.scheduler.state_dict(),
            "position": self.position,
            "random": row_of(self.random.get_state()),
        }

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of any mesh."""
        for parameter in self.model.parameters():  # the moments, to be filled; a step of nothing makes them
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        wanted = self.state()
        if load_tensors_metadata(path)["random"].global_shape[0] != dist.get_world_size():
            del wanted["random"]  # another number of ranks begins new random numbers
        state = remesh.load(wanted, path)
        self.model.load_state_dict(state["model"])
        numbered = {number: state["optimizer"][name] for number, (name, _) in enumerate(self.model.named_parameters())}
        self.optimizer.load_state_dict({"state": numbered, "param_groups": state["groups"]})
        self.scheduler.load_state_dict(state["scheduler"])
        self.position = state["position"]
        if "random" in wanted:
            self.random.set_state(wanted["random"].tensor[0])


def row_of(values: torch.Tensor) -> Piece:
    """What every rank has of its own, as its row of one tensor."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    box = Box.at((rank, 0), (1, len(values)))
    return Piece(values[None].clone(), (num_ranks, len(values)), (Shard(0, box),))


if __name__ == "__main__":
    main()
