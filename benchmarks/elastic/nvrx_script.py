"""The same small training as ``remesh_script.py``, under NVIDIA's in-process restart: its wrapper around a function.

What the wrapper calls anew keeps its process, and starts from the checkpoint.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from benchmarks.elastic.model import BATCH_SIZE, SAVE_EVERY, STEP_S, make_batch, make_model, pace
from remesh.elastic.events import EventLog

OFTEN = timedelta(seconds=0.1)
GLOO_TIMEOUT = timedelta(seconds=2)
"""It ends the wait of a rank whose own connections all live; a step takes a fortieth of it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--groups-port", type=int, required=True)
    options = parser.parse_args()
    log = EventLog(options.folder / "events", f"worker-{os.getpid()}")
    # The wrapper's own store is at MASTER_PORT. That of the groups is served by the first rank too, which lives on.
    store = dist.TCPStore("127.0.0.1", options.groups_port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)

    def train(call: inprocess.CallWrapper = None) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=rank,
            world_size=world_size,
            timeout=GLOO_TIMEOUT,
        )
        _train(options, log, rank, world_size)

    wrapped = inprocess.Wrapper(
        monitor_thread_interval=OFTEN,
        monitor_process_interval=OFTEN,
        heartbeat_interval=OFTEN,
        progress_watchdog_interval=OFTEN,
        last_call_wait=OFTEN,
        soft_timeout=timedelta(seconds=20),
        hard_timeout=timedelta(seconds=30),
    )(train)
    wrapped()


def _train(options: argparse.Namespace, log: EventLog, rank: int, world_size: int) -> None:
    checkpoint = options.folder / "checkpoint.pt"
    model = make_model()
    optim = torch.optim.AdamW(model.parameters())
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        step = saved["step"]
    while step < options.steps:
        with pace(STEP_S):
            x = make_batch(step, rank, BATCH_SIZE // world_size)
            (model(x) - x).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            optim.step()
            optim.zero_grad()
        step += 1
        log.write("step", step=step, rank=rank, world_size=world_size)
        if step % SAVE_EVERY == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "step": step}, f"{checkpoint}.tmp")
            Path(f"{checkpoint}.tmp").rename(checkpoint)


if __name__ == "__main__":
    main()
