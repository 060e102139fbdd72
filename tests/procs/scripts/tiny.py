"""A training script small enough to be killed often. Its flags choose the layout and the mishap."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch._dynamo  # for seconds, at the first step of any optimizer: nobody is to wait for that in a collective
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import remesh
from remesh.elasticity.training.position import Position, plan_batch
from remesh.elasticity.training.sample_stream import Stream
from tests.support.hold import wait_if_held

WIDTH, NUM_SAMPLES, BATCH_SIZE, SEED = 8, 50, 12, 3


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(WIDTH, generator=generator)


class Shuffled(torch.utils.data.IterableDataset):
    """The same samples in the same orders, but only one after the other."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        at = Position(0, self.epoch * NUM_SAMPLES)
        order = plan_batch(at, num_samples=NUM_SAMPLES, batch_size=NUM_SAMPLES, seed=SEED, num_epochs=None)
        return (Samples()[index] for index in order)


class OwnOrder(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(NUM_SAMPLES).tolist())


STREAMS: dict[str, Callable[[], Any]] = {
    "by-epoch": Shuffled,
    "loader": lambda: torch.utils.data.DataLoader(Samples(), batch_size=None, shuffle=True),
    "own-order": lambda: torch.utils.data.DataLoader(Samples(), batch_size=None, sampler=OwnOrder()),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--snapshot-every", type=int)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--stream", choices=STREAMS, help="read the samples as an iterable without indices")
    parser.add_argument("--pause-s", type=float, default=0.05, help="length of a step")
    parser.add_argument(
        "--full-size", type=int, default=1, help="with fewer ranks steps take their time, the last most"
    )
    parser.add_argument("--mishap", choices=["raise", "vote-no", "stuck"])
    parser.add_argument("--attempt", action="store_true", help="stay in the loop of steps when a member is replaced")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    parser.add_argument("--accumulate", type=int, default=1, help="commits to one step of the optimizer")
    parser.add_argument(
        "--accumulate-other", type=int, help="commits to one step of another optimizer, of the last layer"
    )
    parser.add_argument("--reduce-late", action="store_true", help="gradients are added up before that step alone")
    parser.add_argument("--window-bytes", type=int, help="carry by windows")
    parser.add_argument("--hold", help="STEP:FILE: wait at that step until the file is there")
    parser.add_argument("--slow", help="NODE/SLOT of a worker that takes 0.3 s longer for a step")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    mesh = {axis: int(size) for axis, size in (part.split("=") for part in options.mesh.split(","))}

    is_slow = options.slow == f"{os.environ['REMESH_NODE']}/{os.environ['REMESH_SLOT']}"

    def train(job: remesh.Job) -> None:
        job.log("entered")
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(4 * WIDTH, WIDTH)
        ).to(job.mesh.device_type)
        if options.fsdp:
            fully_shard(model, mesh=job.mesh["dp"])
        halves = model.parameters() if options.accumulate_other is None else model[0].parameters()
        optims = {"optim": torch.optim.AdamW(halves, lr=1e-2)}
        if options.accumulate_other is not None:
            optims["other"] = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
        data: Samples | Stream = Stream(STREAMS[options.stream]()) if options.stream else Samples()
        carried = {"model": model, **optims} | ({"data": data} if options.stream else {})
        job.carry(window_bytes=options.window_bytes, **carried)
        attempt = job.attempt if options.attempt else contextlib.nullcontext
        for indices, x in job.batches(data, BATCH_SIZE, max_steps=options.steps):
            with attempt():
                take_step(job, model, [*optims.values()], indices, x)

    def take_step(
        job: remesh.Job,
        model: torch.nn.Module,
        optims: list[torch.optim.Optimizer],
        indices: torch.Tensor,
        x: torch.Tensor,
    ) -> None:
        wait_if_held(job, options.hold)
        job.log("batch", samples=indices.tolist() if job.batch_weight else [])
        is_near_the_end = job.step >= options.steps - 15
        time.sleep(options.pause_s if job.world_size >= options.full_size else 5 if is_near_the_end else 0.4)
        time.sleep(0.3 * is_slow)
        x = x.to(job.mesh.device_type)
        loss = (model(x) - x.roll(1, -1)).square().mean() * job.batch_weight
        periods = options.accumulate, options.accumulate_other
        due = [one for one, period in zip(optims, periods, strict=False) if (job.step + 1) % period == 0]
        is_last = (job.step + 1) % options.accumulate == 0
        if options.fsdp:
            if options.reduce_late:
                model.set_requires_gradient_sync(is_last)
            loss.backward()
        else:
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
            ):
                gradient /= dist.get_world_size()
                if not options.reduce_late:
                    dist.all_reduce(gradient)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                if options.reduce_late and is_last:
                    dist.all_reduce(parameter.grad)
        bad_step = job.step == 5 and job.rank == 1
        if options.mishap == "raise" and bad_step:
            raise ValueError("the sky is falling")
        if options.mishap == "stuck" and bad_step and job.generation == 1:
            time.sleep(3600)
        if job.commit(ok=not (options.mishap == "vote-no" and bad_step)):
            for optim in due:
                optim.step()
            job.log("step", checksum=checksum(model), draw=float(torch.rand(())))
        for optim in due:
            optim.zero_grad()

    remesh.elastic(
        train,
        mesh,
        checkpoint=options.checkpoint,
        save_every=options.save_every,
        seed=SEED,
        timeout_s=options.timeout_s,
        snapshot_every=options.snapshot_every,
    )


def checksum(model: torch.nn.Module) -> float:
    """The same number on every layout, up to rounding."""
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return float(sum(p.detach().square().sum() for p in parts))


if __name__ == "__main__":
    main()
