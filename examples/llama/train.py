"""Train a Llama under FSDP2 x TP x PP, in the manner of torchtitan, as a job that goes on when nodes die.

    remesh run --standalone --nproc-per-node 8 examples/llama/train.py

Four workers train as pp=2 x dp=1 x tp=2, eight as pp=2 x dp=2 x tp=2, two as pp=1 x dp=1 x tp=2. `run.py` kills a node.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig, PythonDocs, cut, parallelize
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import remesh

BATCH_SIZE, NUM_MICROBATCHES = 16, 4
CONFIG = LlamaConfig()


def train(job: remesh.Job, steps: int) -> None:
    stage, num_stages = job.mesh["pp"].get_local_rank(), job.mesh["pp"].size()
    is_first, is_last = stage == 0, stage == num_stages - 1
    torch.manual_seed(0)
    model = parallelize(cut(Llama(CONFIG), stage, num_stages), job.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job.carry(model=model, optimizer=optimizer)

    def loss_of(logits_BTV: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten()) * job.batch_weight

    part = PipelineStage(model, stage, num_stages, torch.device("cpu"), group=job.mesh["pp"].get_group())
    schedule = Schedule1F1B(part, NUM_MICROBATCHES, loss_of)
    for tokens in job.batches(PythonDocs(CONFIG), BATCH_SIZE, max_steps=steps):
        inputs, target, losses = (tokens[:, :-1],) if is_first else (), tokens[:, 1:], []
        schedule.step(*inputs, target=target if is_last else None, losses=losses if is_last else None)
        if is_last:
            loss = torch.stack([one.detach() for one in losses]).mean()
            dist.all_reduce(loss, group=job.mesh["dp"].get_group())
            loss /= job.mesh["dp"].size()
        if job.commit():  # all ranks take the step, or none does
            optimizer.step()
            if is_last:
                job.log("step", loss=loss.item())
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    remesh.elastic(lambda job: train(job, options.steps), mesh={"pp": [2, 1], "dp": -1, "tp": 2}, snapshot_every=2)


if __name__ == "__main__":
    main()
