"""The training script of the demo: what a user of Remesh writes. Start it with ``remesh run``."""

import argparse
import time

import gpt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import remesh

BATCH_SIZE = 16
SEED = 0
NUM_SAMPLES = 1000


def average_gradients(model: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
    """One all-reduce of all gradients over the data-parallel ranks."""
    if "dp" not in mesh.mesh_dim_names or mesh["dp"].size() == 1:
        return
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads]) / mesh["dp"].size()
    dist.all_reduce(flat, group=mesh["dp"].get_group())
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def mean_loss(loss: torch.Tensor, mesh: torch.distributed.DeviceMesh) -> float:
    """The loss of the whole batch, for the log."""
    total = loss.detach().clone()
    if "dp" in mesh.mesh_dim_names and mesh["dp"].size() > 1:
        dist.all_reduce(total, group=mesh["dp"].get_group())
        total /= mesh["dp"].size()
    return total.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", required=True, help="for example dp=-1,tp=2")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--step-s", type=float, default=0.0, help="a step takes at least so long, as of a larger model")
    options = parser.parse_args()
    template = {axis: int(size) for axis, size in (part.split("=") for part in options.mesh.split(","))}
    # Double precision: rounding differs between layouts, and must be too small to hide a lost sample.
    torch.set_default_dtype(torch.float64)
    dataset = gpt.StandardLibraryText(NUM_SAMPLES)

    def train(job: remesh.Job) -> None:
        model = gpt.parallelize(gpt.GPT(), job.mesh)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        job.carry(model=model, optim=optim)
        for indices, tokens in job.batches(dataset, batch_size=BATCH_SIZE, max_steps=options.steps):
            begun_s = time.monotonic()
            job.log("batch", samples=indices.tolist() if job.batch_weight else [])
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * job.batch_weight
            loss.backward()
            average_gradients(model, job.mesh)
            time.sleep(max(0.0, begun_s + options.step_s - time.monotonic()))
            whole_loss = mean_loss(loss, job.mesh)
            if job.commit():
                optim.step()
                job.log("step", loss=whole_loss)
            optim.zero_grad()
        job.save()

    remesh.elastic(train, mesh=template, checkpoint=options.checkpoint, seed=SEED)


if __name__ == "__main__":
    main()
