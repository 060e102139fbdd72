"""A model split over all ranks, so that nobody else holds what one holds. A lost member is replaced within a step."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import remesh
from tests.support.hold import wait_if_held

WIDTH, NUM_SAMPLES, BATCH_SIZE, SEED = 8, 50, 12, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between snapshots, and between checkpoints")
    parser.add_argument("--hold", help="STEP:FILE: wait at that step until the file is there")
    options = parser.parse_args()

    def train(job: remesh.Job) -> None:
        job.log("entered")
        torch.manual_seed(SEED)
        mesh = job.mesh["tp"]
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(
            distribute_tensor(torch.randn(4 * WIDTH, WIDTH), mesh, [Shard(0)], src_data_rank=None)
        )
        optim = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        job.carry(model=layer, optim=optim)
        samples = torch.utils.data.TensorDataset(torch.arange(NUM_SAMPLES), torch.randn(NUM_SAMPLES, WIDTH))
        for indices, x in job.batches(samples, BATCH_SIZE, max_steps=options.steps):
            with job.attempt():
                wait_if_held(job, options.hold)
                time.sleep(0.1)
                loss = (x @ layer.weight.to_local().T).square().mean()
                loss.backward()
                whole = loss.detach().clone()
                dist.all_reduce(whole)
                if job.commit():
                    optim.step()
                    job.log("step", loss=float(whole), samples=indices.tolist())
                optim.zero_grad()

    checkpoint = options.checkpoint
    remesh.elastic(
        train, {"tp": 2}, seed=SEED, checkpoint=checkpoint, save_every=options.every, snapshot_every=options.every
    )


if __name__ == "__main__":
    main()
