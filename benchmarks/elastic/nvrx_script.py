"""The same small training as ``remesh_script.py``, under NVIDIA's in-process restart: its wrapper around a function.

What the wrapper calls anew keeps its process, and starts from the checkpoint.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

from benchmarks.elastic.from_checkpoint import train_from_checkpoint
from remesh.elasticity.telemetry.events import EventLog

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
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=GLOO_TIMEOUT,
        )
        train_from_checkpoint(options.folder, options.steps, log)

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


if __name__ == "__main__":
    main()
