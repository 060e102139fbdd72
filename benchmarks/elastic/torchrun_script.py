"""The same small training as ``remesh_script.py``, written for torchrun: it restarts from a checkpoint."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.elastic.from_checkpoint import train_from_checkpoint
from remesh.elasticity.telemetry.events import EventLog


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    log = EventLog(options.folder / "events", f"worker-{os.getpid()}")
    train_from_checkpoint(options.folder, options.steps, log, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
