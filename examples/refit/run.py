"""A trainer feeds a generator: four ranks train a GPT under FSDP2 x TP 2, three generate with it under TP 3.

    python examples/refit/run.py [--versions 4] [--steps 5]

After every few steps the new weights go to the generator, into the buffers that it does not read at the time. Query,
key and value are three parameters where they are trained and one fused, packed parameter where they are used: each
rank of the generator gets its rows of each, and nothing else. The logits of both are compared bit by bit.
"""

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import CONTEXT, GPT, NUM_BYTES, NUM_LAYERS, PARTS, WIDTH, Weights, compute_logits, parallelize
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from remesh.layout import Box, Mesh, Packed, Shard, layout_from_spec
from remesh.layout.from_torch import Piece
from remesh.resharding import Refit

TRAINERS = [[0, 1], [2, 3]]
GENERATORS = [4, 5, 6]
WORLD_SIZE = 7
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=4, help="how often the generator is refitted")
    parser.add_argument("--steps", type=int, default=5, help="steps of training between two versions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder, args.versions, args.steps), WORLD_SIZE, start_method="fork")


def work(rank: int, folder: str, num_versions: int, num_steps: int) -> None:
    """One rank, trainer or generator."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    # Every rank makes both meshes, since making their groups is collective.
    trainers = DeviceMesh("cpu", TRAINERS, mesh_dim_names=("dp", "tp"))
    generators = DeviceMesh("cpu", GENERATORS, mesh_dim_names=("tp",))
    trainer = Trainer(trainers) if rank not in GENERATORS else None
    take = make_buffers(GENERATORS.index(rank)) if trainer is None else {}
    refit = Refit(take, host_of={r: "trainer" if r not in GENERATORS else "generator" for r in range(WORLD_SIZE)})
    prompt_BT = torch.randint(NUM_BYTES, (2, CONTEXT), generator=torch.Generator().manual_seed(SEED))
    for version in range(1, num_versions + 1):
        loss = trainer.train(num_steps) if trainer else 0.0
        handle = refit.start(trainer.model.state_dict() if trainer else {}, version if trainer else None)
        if trainer is None and refit.version is not None:
            # While version n arrives, readers go on with version n - 1.
            with refit.read() as old:
                compute_logits(read_weights(old.tensors, generators["tp"]), prompt_BT)
        moved = handle.result(timeout_s=60)
        if trainer:
            logits_BTV = compute_logits(trainer.weights(), prompt_BT)
            with torch.no_grad():  # it is the model that was trained, but for the order of its sums
                torch.testing.assert_close(logits_BTV, trainer.model(prompt_BT), rtol=1e-4, atol=1e-4)
        else:
            with refit.read() as new:
                logits_BTV = compute_logits(read_weights(new.tensors, generators["tp"]), prompt_BT)
        told_BTV = logits_BTV.clone()
        dist.broadcast(told_BTV, src=GENERATORS[0])
        if not torch.equal(told_BTV.view(torch.int32), logits_BTV.view(torch.int32)):
            raise SystemExit(f"version {version}: logits of rank {rank} differ from the generator's")
        if rank == 0:
            kilobytes = sum(moved.bytes_by_pair.values()) / 1024
            print(
                f"version {version}: loss {loss:.3f}, moved {kilobytes:.0f} KiB in {1e3 * moved.seconds:.1f} ms, "
                f"{refit.num_planned} plan made, logits equal to the last bit on {WORLD_SIZE} ranks",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


class Trainer:
    """One rank's part of the training."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(SEED)
        self.mesh = mesh
        self.model = parallelize(GPT(), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.chance = torch.Generator().manual_seed(1 + mesh.get_local_rank("dp"))
        self.text = torch.frombuffer(bytearray(time.__doc__.encode()), dtype=torch.uint8).long()

    def train(self, num_steps: int) -> float:
        """Some steps on real text; the last loss."""
        for _ in range(num_steps):
            starts = torch.randint(len(self.text) - CONTEXT - 1, (8,), generator=self.chance).tolist()
            bytes_BT = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts])
            logits_BTV = self.model(bytes_BT[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), bytes_BT[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def weights(self) -> Weights:
        """What this rank's tensor parallelism leaves to it, FSDP's shards put together."""
        tensors = {}
        for name, tensor in self.model.state_dict().items():
            axes = tensor.device_mesh.mesh_dim_names
            if axes == ("dp",):
                tensors[name] = tensor.full_tensor()
            else:
                tensors[name] = tensor.redistribute(placements=[Replicate(), tensor.placements[1]]).to_local()
        return Weights(tensors, join_over(self.mesh["tp"]))


def make_buffers(tp_rank: int) -> dict[str, Piece | torch.Tensor]:
    """What one rank of the generator wants, by the trainer's names; QKV as three parts of one fused buffer."""
    shapes = {name: tensor.shape for name, tensor in GPT().state_dict().items()}
    mesh = Mesh.of({"tp": len(GENERATORS)})
    specs = {"up": "S0R", "out": "RS0", "down": "RS0"}
    wanted: dict[str, Piece | torch.Tensor] = {}
    for name, shape in shapes.items():
        layer = name.split(".")[-2] if name.startswith("blocks") else ""
        if layer in specs:
            shards = layout_from_spec(specs[layer], tuple(shape), mesh, "float32").shards_of(tp_rank)
            wanted[name] = Piece(torch.zeros(shards[0].box.shape), tuple(shape), (Shard(0, shards[0].box),))
        elif layer not in PARTS:
            wanted[name] = torch.zeros(shape)
    for number in range(NUM_LAYERS):
        packed = Packed(0, (WIDTH,) * len(PARTS))
        fused = layout_from_spec("S0R", (len(PARTS) * WIDTH, WIDTH), mesh, "float32", packed=[packed])
        mine = fused.shards_of(tp_rank)
        buffer = torch.zeros(sum(shard.box.size for shard in mine))
        for part, (name, shard) in enumerate(zip(PARTS, mine, strict=True)):
            # Rows of the fused parameter, counted from where its part begins.
            rows = Box(*((at[0] - part * WIDTH, at[1]) for at in (shard.box.start, shard.box.stop)))
            whole = (WIDTH, WIDTH)
            wanted[f"blocks.{number}.{name}.weight"] = Piece(buffer, whole, (Shard(0, rows, shard.offset),))
    return wanted


def read_weights(tensors: dict[str, Piece | torch.Tensor], tp: DeviceMesh) -> Weights:
    """The generator's weights of one version: of the fused buffer the views of its parts."""
    seen = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Piece):
            (shard,) = tensor.shards
            flat = tensor.tensor.reshape(-1)
            tensor = flat[shard.offset : shard.offset + shard.box.size].view(shard.box.shape)
        seen[name] = tensor
    return Weights(seen, join_over(tp))


def join_over(tp: DeviceMesh):
    """Concatenation of what the ranks of an axis have."""

    def join(mine: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(mine) for _ in range(tp.size())]
        dist.all_gather(parts, mine.contiguous(), group=tp.get_group())
        return torch.cat(parts)

    return join


if __name__ == "__main__":
    main()
