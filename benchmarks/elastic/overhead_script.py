"""Steps of a fixed length over a sharded state; tells how long each step spent inside Remesh."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, zeros

import remesh
from benchmarks.elastic.model import BATCH_SIZE, WIDTH

STEP_S = 0.1


class Rows(torch.utils.data.Dataset):
    """A dataset that costs nothing: fetching samples is the user's."""

    def __init__(self) -> None:
        self._row = torch.zeros(WIDTH)

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--state-mib", type=int, required=True, help="per rank")
    parser.add_argument("--snapshot-every", type=int)
    options = parser.parse_args()

    rows = Rows()

    def train(job: remesh.Job) -> None:
        height = job.world_size * options.state_mib
        state = zeros(height, 1 << 18, device_mesh=job.mesh, placements=[Shard(0)])
        job.carry(state=state)
        left_s, floor_s = None, 0.0
        for _ in job.batches(rows, BATCH_SIZE, max_steps=options.steps):
            if left_s is not None:
                job.log("overhead", seconds=time.perf_counter() - left_s, floor=floor_s)
            time.sleep(STEP_S)
            # Ranks meet here, as in the reduction of their gradients: what follows is Remesh's own.
            dist.all_reduce(torch.zeros(1))
            met_s = time.perf_counter()
            # What a vote costs at least, on the same ranks in the same moment.
            dist.all_reduce(torch.zeros(4, dtype=torch.int32), dist.ReduceOp.MAX)
            left_s = time.perf_counter()
            floor_s = left_s - met_s
            job.commit()

    remesh.elastic(train, {"dp": -1}, snapshot_every=options.snapshot_every)


if __name__ == "__main__":
    main()
