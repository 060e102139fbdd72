"""Checkpoints as a user of Megatron Core writes them: save under TP 2 x DP 2, load under TP 4.

    python examples/checkpoint/megatron.py

Only the imports say which package it is. The model is a column-parallel and a row-parallel layer with a fused, gated
first weight; the optimizer is Adam; the save runs in the background, its replicas share the writing, and each shard is
read once by the load.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from remesh import dist_checkpointing  # was: from megatron.core import dist_checkpointing
from remesh.dist_checkpointing.mapping import ShardedTensorFactory
from remesh.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from remesh.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from remesh.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from remesh.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

WIDTH, HIDDEN, NUM_RANKS = 8, 16, 4


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        for tp_size in (2, 4):
            mp.start_processes(work, (tp_size, root), NUM_RANKS, start_method="fork")


def work(rank: int, tp_size: int, root: str) -> None:
    """One rank of a job that saves, with TP 2, or loads, with another size."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/rendezvous-{tp_size}", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    job = Job(rank % tp_size, tp_size, rank // tp_size)
    if tp_size == 2:
        job.train()
        job.save(Path(root) / "step-00000003")
    else:
        job.load(Path(root) / "step-00000003")
        print(f"rank {rank}: weights and Adam's moments are those of the whole model, under TP {tp_size}")
    dist.destroy_process_group()


class Job:
    """A model with its optimizer on one rank. Every value follows from its place in the whole, so it can be checked."""

    def __init__(self, tp_rank: int, tp_size: int, dp_rank: int) -> None:
        self.tp_rank, self.tp_size, self.dp_rank = tp_rank, tp_size, dp_rank
        self.gated = torch.nn.Parameter(torch.zeros(2 * HIDDEN // tp_size, WIDTH))
        self.down = torch.nn.Parameter(torch.zeros(WIDTH, HIDDEN // tp_size))
        self.optimizer = torch.optim.Adam([self.gated, self.down], lr=0.1)

    def train(self) -> None:
        """Give every parameter the values of its place, and step once."""
        with torch.no_grad():
            for parameter, values in zip((self.gated, self.down), self.wanted(), strict=True):
                parameter.copy_(values)
                parameter.grad = values.clone()
        self.optimizer.step()

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of both weights before the step."""
        whole = torch.arange(1.0, 2 * HIDDEN * WIDTH + 1).reshape(2 * HIDDEN, WIDTH)
        up, gate = (half.chunk(self.tp_size)[self.tp_rank] for half in whole.chunk(2))
        down = torch.arange(1.0, WIDTH * HIDDEN + 1).reshape(WIDTH, HIDDEN).chunk(self.tp_size, 1)[self.tp_rank]
        return torch.cat([up, gate]), down

    def model_part(self) -> dict:
        """The sharded state dict of the model; the fused weight is two tensors, whatever the number of ranks."""
        make = dist_checkpointing.ShardedTensor.from_rank_offsets
        rank, size = self.tp_rank, self.tp_size

        def build(key, data, replica_id, flattened_range):
            halves = data.chunk(2)
            places = [(0, at * size + rank, 2 * size) for at in range(2)]
            return [make(key, half, at, replica_id=replica_id) for half, at in zip(halves, places, strict=True)]

        factory = ShardedTensorFactory("gated", self.gated, build, torch.cat, self.dp_rank)
        return {"gated": factory, "down": make("down", self.down, (1, rank, size), replica_id=self.dp_rank)}

    def state(self) -> dict:
        """The sharded state dict of model and optimizer."""
        model, optimizer = self.model_part(), self.optimizer.state_dict()
        if not optimizer["state"]:  # a load into a new optimizer needs something to fill
            for index, parameter in enumerate((self.gated, self.down)):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer["state"][index] = {"step": torch.tensor(0.0), **moments}
        ids = get_param_id_to_sharded_param_map(model, (self.gated, self.down))
        num_steps = optimizer["state"][0]["step"]  # the same for all parameters, and no tensor that is sharded
        optim_state_to_sharding_state(optimizer, ids, exclude_keys=("step",))
        return {"model": model, "optimizer": optimizer, "num_steps": num_steps, "iteration": 3}

    def save(self, directory: Path) -> None:
        """Save in the background and wait for it; a trainer goes on instead and finalizes later."""
        if dist.get_rank() == 0:
            directory.mkdir()
        dist.barrier()
        queue = AsyncCallsQueue()
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
        request = dist_checkpointing.save(self.state(), directory, strategy, async_sharded_save=True)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()

    def load(self, directory: Path) -> None:
        """Load on another number of ranks, and compare with a job that was never saved."""
        strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
        state = dist_checkpointing.load(self.state(), directory, strategy)
        with torch.no_grad():
            self.gated.copy_(state["model"]["gated"])
            self.down.copy_(state["model"]["down"])
        for of_parameter in state["optimizer"]["state"].values():
            of_parameter["step"] = state["num_steps"].clone()
        self.optimizer.load_state_dict(state["optimizer"])
        other = Job(self.tp_rank, self.tp_size, self.dp_rank)
        other.train()
        assert state["iteration"] == 3
        assert torch.equal(self.gated, other.gated) and torch.equal(self.down, other.down)
        for mine, theirs in zip((self.gated, self.down), (other.gated, other.down), strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(self.optimizer.state[mine][name], other.optimizer.state[theirs][name])


if __name__ == "__main__":
    main()
