"""One small training in many layouts, with the same losses in all of them. It trains until a file tells it to stop."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import remesh
from remesh.elasticity.training.position import Position, plan_batch

WIDTH, NUM_SAMPLES, BATCH_SIZE, SEED, LEARNING_RATE = 8, 50, 12, 3, 1e-3
MESHES = {
    "dp": {"dp": -1},
    "tp": {"dp": -1, "tp": 2},
    # Stages apart: a node that dies takes one along.
    "pp": {"pp": 2, "dp": -1},
    "fsdp": {"dp": -1},
}


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def make_layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "up": nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.float64),
        "act": nn.Tanh(),
        "down": nn.Linear(4 * WIDTH, WIDTH, dtype=torch.float64),
    }


def loss_of(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (y - x.roll(1, -1)).square().mean()


def reference_losses(num_steps: int) -> list[float]:
    """The loss of every step, of a training in one process that nothing happens to."""
    model = nn.Sequential(*make_layers().values())
    optim = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    samples = torch.stack([sample for _, sample in (Samples()[index] for index in range(NUM_SAMPLES))])
    position, losses = Position(), []
    for _ in range(num_steps):
        batch = plan_batch(position, num_samples=NUM_SAMPLES, batch_size=BATCH_SIZE, seed=SEED, num_epochs=None)
        x = samples[list(batch)]
        loss = loss_of(model(x), x)
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(float(loss.detach()))
        position = position.after(len(batch))
    return losses


class Model(nn.Module):
    """This rank's part of the layers; ``backward`` leaves gradients that are summed over the data axis."""

    def __init__(self, layout: str, job: remesh.Job) -> None:
        super().__init__()
        layers = make_layers()
        self.stages = job.mesh["pp"].get_group() if layout == "pp" else None
        self.stage = dist.get_rank(self.stages) if self.stages is not None else -1
        kept = {-1: ["up", "act", "down"], 0: ["up", "act"], 1: ["down"]}[self.stage]
        self.layers = nn.Sequential()
        for name in kept:
            self.layers.add_module(name, layers[name])
        if layout == "tp":
            parallelize_module(self.layers, job.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.reduces = layout != "fsdp"
        if layout == "fsdp":
            fully_shard(self.layers, mesh=job.mesh["dp"])
        self.data = job.mesh["dp"].get_group()

    def backward(self, x: torch.Tensor, weight: float) -> torch.Tensor:
        """This rank's share of the loss; 0 where the loss is not seen."""
        if self.stages is None:
            loss = loss_of(self.layers(x), x) * weight
            loss.backward()
        elif self.stage == 0:
            loss = self._first_stage(x)
        else:
            loss = self._last_stage(x, weight)
        if self.reduces:
            for parameter in self.parameters():
                grad = parameter.grad
                assert grad is not None
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                dist.all_reduce(local, group=self.data)
                local /= dist.get_world_size(self.data)
        return loss.detach()

    def _first_stage(self, x: torch.Tensor) -> torch.Tensor:
        assert self.stages is not None
        peer = dist.get_global_rank(self.stages, 1)
        h = self.layers(x)
        dist.send(h.detach(), peer)
        grad = torch.empty_like(h)
        dist.recv(grad, peer)
        h.backward(grad)
        return torch.zeros((), dtype=torch.float64)

    def _last_stage(self, x: torch.Tensor, weight: float) -> torch.Tensor:
        assert self.stages is not None
        peer = dist.get_global_rank(self.stages, 0)
        h = torch.empty(len(x), 4 * WIDTH, dtype=torch.float64)
        dist.recv(h, peer)
        h.requires_grad_()
        loss = loss_of(self.layers(h), x) * weight
        loss.backward()
        assert h.grad is not None
        dist.send(h.grad, peer)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=MESHES, required=True)
    parser.add_argument("--stop", type=Path, required=True, help="all ranks return once this file is there")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--snapshot-every", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=0.05, help="length of a step")
    parser.add_argument("--timeout-s", type=float, default=20.0)
    options = parser.parse_args()

    def train(job: remesh.Job) -> None:
        model = Model(options.layout, job)
        optim = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        job.carry(model=model, optim=optim)
        copies = job.world_size // (2 if options.layout == "pp" else 1)
        for indices, x in job.batches(Samples(), BATCH_SIZE):
            share = job.mesh["dp"].get_local_rank()
            job.log("batch", share=share, samples=indices.tolist() if job.batch_weight else [])
            time.sleep(options.pause_s)
            loss = model.backward(x, job.batch_weight)
            told = torch.stack([loss, torch.tensor(float(options.stop.exists()), dtype=torch.float64)])
            dist.all_reduce(told)
            if job.commit():
                optim.step()
                job.log("step", loss=float(told[0]) / copies, world_size=job.world_size)
            optim.zero_grad()
            if told[1]:
                return

    remesh.elastic(
        train,
        MESHES[options.layout],
        checkpoint=options.checkpoint,
        save_every=options.save_every,
        snapshot_every=options.snapshot_every,
        seed=SEED,
        timeout_s=options.timeout_s,
    )


if __name__ == "__main__":
    main()
