"""A pipeline job that is cut anew while it trains: 2 stages, then 1, then 4, and the weights are those of one process.

    python examples/pipeline/run.py [--config gpt-small] [--stages 2 1 4] [--steps 2] [--schedule eager-split]

After each phase every layer, with its optimizer state, finds its new stage: by a reshard in memory, or through a
checkpoint (`--through checkpoint`). Both go by names; no code says where a layer was. At the end the weights are
compared with those of a single process that trained on the same batches.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import Recipe, names, recipe_of
from torch import nn

import remesh
from remesh.elasticity.training_state import CarriedState
from remesh.pipeline import SCHEDULES, Pipeline, Stage, split_model

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="gpt-small", choices=names())
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 1, 4], help="number of stages of each phase")
    parser.add_argument("--steps", type=int, default=2, help="steps of each phase")
    parser.add_argument("--schedule", default="eager-split", choices=sorted(SCHEDULES))
    parser.add_argument("--through", default="memory", choices=["memory", "checkpoint"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (args, folder), max(args.stages), start_method="fork")


class Phase:
    """A stay on a number of stages: this rank's stage, if it has one."""

    def __init__(self, recipe: Recipe, num_stages: int, schedule: str) -> None:
        rank = dist.get_rank()
        group = dist.new_group(list(range(num_stages)))
        self.recipe, self.pipeline, self.state = recipe, None, {}
        if rank >= num_stages:
            return
        parts = split_model(build(recipe), recipe.cut(num_stages))
        module = parts.modules[rank]
        self.is_first, self.is_last = rank == 0, rank == num_stages - 1
        table = SCHEDULES[schedule](num_stages, recipe.num_microbatches)
        stage = Stage(rank, module, loss=recipe.loss if self.is_last else None)
        self.pipeline = Pipeline(stage, parts.graph, table, group=group)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        self.carried = CarriedState({"model": module, "optim": self.optimizer})
        self.state = self.carried.tensors()

    def allocate(self) -> None:
        """Make room for optimizer state that is about to come."""
        if self.pipeline is not None:
            self.carried.make([f"optim.state.{name}" for name in self.carried.tensors()])
            self.state = self.carried.tensors()

    def train(self, step: int) -> float | None:
        """One step; the loss, on the last stage."""
        if self.pipeline is None:
            return None
        batch, target = self.recipe.make_batch(self.recipe.batch, step)
        self.optimizer.zero_grad()
        report = self.pipeline.step(
            {self.recipe.entry: batch} if self.is_first else {}, target if self.is_last else None
        )
        self.optimizer.step()
        self.state = self.carried.tensors()
        return None if report.loss is None else float(report.loss)


def build(recipe: Recipe) -> nn.Module:
    """The model with the weights that all ranks begin with."""
    torch.manual_seed(SEED)
    return recipe.build()


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank through all phases."""
    torch.set_num_threads(1)
    world_size = max(args.stages)
    store = dist.FileStore(f"{folder}/rendezvous", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    recipe = recipe_of(args.config)
    step, before = 0, None
    for num_stages in args.stages:
        phase = Phase(recipe, num_stages, args.schedule)
        if before is not None:
            phase.allocate()
            carry(before, phase, f"{folder}/step-{step}" if args.through == "checkpoint" else None)
        for _ in range(args.steps):
            loss = phase.train(step)
            if loss is not None:
                print(f"step {step}: {num_stages} stages, loss {loss:.6f}", flush=True)
            step += 1
        before = phase
    compare(recipe, before, step)
    dist.destroy_process_group()


def carry(before: Phase, after: Phase, path: str | None) -> None:
    """Bring every tensor from the stage where it was to the stage where it is wanted."""
    if path is None:
        remesh.reshard(before.state, after.state)
    else:
        remesh.save(before.state, path)
        remesh.load(after.state, path)


def compare(recipe: Recipe, last: Phase, num_steps: int) -> None:
    """Train in one process, and compare the weights bit by bit."""
    model = build(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        optimizer.zero_grad()
        batch, target = recipe.make_batch(recipe.batch, step)
        num = recipe.num_microbatches
        for part, wanted in zip(batch.chunk(num), target.chunk(num), strict=True):
            (recipe.loss(model(part), wanted) / num).backward()
        optimizer.step()
    oracle = {f"model.{name}": value for name, value in model.named_parameters()}
    mine = [name for name in last.state if name in oracle]
    equal = sum(torch.equal(last.state[name], oracle[name]) for name in mine)
    print(f"rank {dist.get_rank()}: {equal} of {len(mine)} weights equal to the last bit", flush=True)


if __name__ == "__main__":
    main()
