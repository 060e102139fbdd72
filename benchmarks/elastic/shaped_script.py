"""A state sharded over all ranks, every element of which says where it stands; steps do nothing."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, zeros

import remesh
from benchmarks.elastic.model import BATCH_SIZE, Samples

COLUMNS = 1 << 16
ROWS_PER_MIB = 4
STEP_S = 0.1


def numbers(state: DTensor, rank: int, world_size: int) -> torch.Tensor:
    """What belongs into this rank's part: the number of its row in every element."""
    height = state.shape[0]
    chunk = -(-height // world_size)
    first = min(rank * chunk, height)
    rows = torch.arange(first, min(first + chunk, height), dtype=torch.float32)
    return rows[:, None].expand(-1, COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state-mib", type=int, required=True, help="over all ranks")
    options = parser.parse_args()

    def train(job: remesh.Job) -> None:
        height = options.state_mib * ROWS_PER_MIB
        state = zeros(height, COLUMNS, device_mesh=job.mesh, placements=[Shard(0)])
        job.carry(state=state)
        wanted = numbers(state, job.rank, job.world_size)
        if job.step == 0:
            state.to_local().copy_(wanted)
        elif not torch.equal(state.to_local(), wanted):
            raise AssertionError(f"rank {job.rank} of {job.world_size} got wrong rows")
        for _ in job.batches(Samples(), BATCH_SIZE):
            time.sleep(STEP_S)
            dist.all_reduce(torch.zeros(1))
            if job.commit():
                job.log("step", world_size=job.world_size)

    remesh.elastic(train, {"dp": -1}, snapshot_every=5, timeout_s=60.0)


if __name__ == "__main__":
    main()
