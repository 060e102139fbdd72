"""A job that trains until a file is there: its ranks may be killed again and again."""

import argparse
import time
from pathlib import Path

import torch
import torch._dynamo  # for seconds, at the first step of any optimizer: nobody is to wait for that in a collective
import torch.distributed as dist

import remesh

SIZE = 1 << 18


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("end", type=Path)
    options = parser.parse_args()

    def train(job: remesh.Job) -> None:
        weight = torch.nn.Parameter(torch.zeros(SIZE))
        model = torch.nn.ParameterList([weight])
        optim = torch.optim.SGD([weight], lr=1e-3, momentum=0.9)
        job.carry(model=model, optim=optim)
        begun = job.step
        for batch in job.batches(Numbers(), 6):
            (weight.mean() * batch.mean() * job.batch_weight).backward()
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
            is_over = torch.tensor(float(job.rank == 0 and options.end.exists()))
            dist.all_reduce(is_over)
            if job.commit():
                optim.step()
            optim.zero_grad()
            if job.step == begun + 4:
                job.log("steady", world=job.world_size)
            time.sleep(0.02)
            if is_over:
                return

    remesh.elastic(train, {"dp": -1}, snapshot_every=1, timeout_s=30.0)


if __name__ == "__main__":
    main()
