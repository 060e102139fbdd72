"""The same small training as ``torchrun_script.py``, written for Remesh."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import remesh
from benchmarks.elastic.model import BATCH_SIZE, SAVE_EVERY, STEP_S, Samples, make_model, pace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()

    def train(job: remesh.Job) -> None:
        model = make_model().to(job.mesh.device_type)
        optim = torch.optim.AdamW(model.parameters())
        job.carry(model=model, optim=optim)
        for x in job.batches(Samples(), BATCH_SIZE, max_steps=options.steps):
            with pace(STEP_S):
                x = x.to(job.mesh.device_type)
                ((model(x) - x).square().mean() * job.batch_weight).backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= job.world_size
                if job.commit():
                    optim.step()
                    job.log("step", world_size=job.world_size)
                optim.zero_grad()

    remesh.elastic(train, {"dp": -1}, checkpoint=options.folder / "checkpoints", save_every=SAVE_EVERY)


if __name__ == "__main__":
    main()
