"""The same small training as ``remesh_script.py``, written for torchft: one replica, a data-parallel rank by itself."""

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.elastic.model import BATCH_SIZE, STEP_S, make_batch, make_model, pace
from remesh.elasticity.telemetry.events import EventLog

TIMEOUT = timedelta(seconds=2)
"""Of collectives. It ends the wait of a rank whose own connections all live; a step takes a fortieth of it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    options = parser.parse_args()
    log = EventLog(options.folder / "events", f"worker-{os.getpid()}")
    model = make_model()
    inner = torch.optim.AdamW(model.parameters())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        min_replica_size=2,
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica-{options.replica}",
        hostname="127.0.0.1",
    )
    optim = Optimizer(manager, inner)
    while manager.current_step() < options.steps:
        with pace(STEP_S):
            optim.zero_grad()
            world_size = max(1, manager.num_participants())
            x = make_batch(manager.current_step(), options.replica, BATCH_SIZE // world_size)
            (model(x) - x).square().mean().backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            before = manager.current_step()
            optim.step()
            if manager.current_step() > before:
                world_size = manager.num_participants()
                log.write("step", step=manager.current_step(), rank=options.replica, world_size=world_size)


if __name__ == "__main__":
    main()
