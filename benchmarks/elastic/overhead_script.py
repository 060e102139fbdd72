"""Steps of a fixed length over a sharded state; tells how long each step spent inside Remesh."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, zeros

import remesh
from benchmarks.elastic.model import BATCH_SIZE, Samples

STEP_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--state-mib", type=int, required=True, help="per rank")
    parser.add_argument("--snapshot-every", type=int)
    options = parser.parse_args()

    def train(job: remesh.Job) -> None:
        rows = job.world_size * options.state_mib
        state = zeros(rows, 1 << 18, device_mesh=job.mesh, placements=[Shard(0)])
        job.carry(state=state)
        left_s = None
        for _ in job.batches(Samples(), BATCH_SIZE, max_steps=options.steps):
            if left_s is not None:
                job.log("overhead", seconds=time.perf_counter() - left_s)
            time.sleep(STEP_S)
            # Ranks meet here, as in the reduction of their gradients: what follows is Remesh's own.
            dist.all_reduce(torch.zeros(1))
            left_s = time.perf_counter()
            job.commit()

    remesh.elastic(train, {"dp": -1}, snapshot_every=options.snapshot_every)


if __name__ == "__main__":
    main()
