"""One job of ``saves.py``: a host, by itself or with ours, saves or loads; the first rank prints what it took.

torchrun --nproc-per-node 2 script.py HOST host|ours save|load FOLDER MEBIBYTES
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_LAYERS = 8
_TIMES = 3


def make(mebibytes: int) -> nn.Module:
    """A model that makes so many MiB with the two moments of AdamW."""
    width = int((mebibytes * (1 << 20) / 12 / _LAYERS) ** 0.5) // 12 * 12
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))


def slowest(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slowest rank, begun together; what this one got."""
    dist.barrier()
    started_s = time.perf_counter()
    made = act()
    seconds = torch.tensor([time.perf_counter() - started_s], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), made


def times(act: Callable[[int], Any]) -> list[float]:
    """Seconds of each of some times in a row, which are numbered."""
    return [slowest(lambda at=at: act(at))[0] for at in range(_TIMES)]


def dcp(is_ours: bool, act: str, folder: Path, mebibytes: int) -> dict[str, list[float]]:
    """``torch.distributed.checkpoint`` under FSDP2."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    from remesh.integrations.dcp import DcpReader, DcpWriter  # noqa: PLC0415

    dist.init_process_group("gloo")
    model = make(mebibytes)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    writer, reader = (DcpWriter, DcpReader) if is_ours else (dcp.FileSystemWriter, dcp.FileSystemReader)
    if act == "load":
        return {"load": times(lambda _: dcp.load(state, storage_reader=reader(folder / "saved0")))}
    background = dist.new_group()
    dcp.save(state, storage_writer=writer(folder / "warm"))
    saved = times(lambda at: dcp.save(state, storage_writer=writer(folder / f"saved{at}")))
    blocked = []
    for at in range(_TIMES):
        seconds, saving = slowest(
            lambda at=at: dcp.async_save(state, storage_writer=writer(folder / f"behind{at}"), process_group=background)
        )
        saving.result()
        blocked.append(seconds)
    return {"save": saved, "blocked by async_save": blocked}


def lightning(is_ours: bool, act: str, folder: Path, mebibytes: int) -> dict[str, list[float]]:
    """``Trainer.save_checkpoint`` and ``fit(ckpt_path=)`` under ``ModelParallelStrategy``."""
    import lightning as L  # noqa: PLC0415
    from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    from remesh.integrations.lightning import RemeshModelParallelStrategy  # noqa: PLC0415

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make(mebibytes)

        def configure_model(self) -> None:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.layers.parameters())

    strategy = (RemeshModelParallelStrategy if is_ours else ModelParallelStrategy)(process_group_backend="gloo")
    told: dict[str, list[float]] = {}
    load = strategy.load_checkpoint

    def timed_load(*args: Any, **kwargs: Any) -> Any:
        seconds, loaded = slowest(lambda: load(*args, **kwargs))
        told["load"] = [seconds]
        return loaded

    strategy.load_checkpoint = timed_load
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=1 if act == "save" else 2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    width = make(mebibytes)[0].in_features
    data = DataLoader(TensorDataset(torch.ones(4, width)), batch_size=2)
    trainer.fit(Module(), data, ckpt_path=folder / "saved0" if act == "load" else None)
    if act == "save":
        trainer.save_checkpoint(folder / "warm")
        told["save"] = times(lambda at: trainer.save_checkpoint(folder / f"saved{at}"))
    return told


def accelerate(is_ours: bool, act: str, folder: Path, mebibytes: int) -> dict[str, list[float]]:
    """``save_state`` and ``load_state`` under DDP."""
    from accelerate import Accelerator  # noqa: PLC0415

    from remesh.integrations.accelerate import RemeshAccelerator  # noqa: PLC0415

    accelerator = (RemeshAccelerator if is_ours else Accelerator)(cpu=True)
    model = make(mebibytes)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    _step(model, optimizer)
    if act == "load":
        return {"load": times(lambda _: accelerator.load_state(str(folder / "saved0")))}
    accelerator.save_state(str(folder / "warm"))
    saved = times(lambda at: accelerator.save_state(str(folder / f"saved{at}")))
    if is_ours:  # waits for the disk as it is
        return {"save": saved, "save until it is on the disk": saved}

    def save_to_disk(at: int) -> None:
        accelerator.save_state(str(folder / f"on-disk{at}"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            to_disk(folder / f"on-disk{at}")

    return {"save": saved, "save until it is on the disk": times(save_to_disk)}


def to_disk(folder: Path) -> None:
    """Wait until all files of a folder, and their names, are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    width = next(iter(model.parameters())).shape[-1]
    model(torch.ones(1, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    host, by, act, folder, mebibytes = sys.argv[1:]
    torch.set_num_threads(1)
    told = {"dcp": dcp, "lightning": lightning, "accelerate": accelerate}[host](
        by == "ours", act, Path(folder), int(mebibytes)
    )
    if dist.get_rank() == 0:
        print("told", json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
