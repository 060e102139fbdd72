"""A plain script that meets with gloo and adds numbers up; rank 1 is killed in the first attempt.

Usage: meets.py FOLDER. Each attempt of each rank leaves an empty file ``<rank>-<attempt>-<pid>`` there, and one with
``ok-`` before its name once it has come through.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    rank, attempt = int(os.environ["RANK"]), len(list(Path(sys.argv[1]).glob(f"{os.environ['RANK']}-*")))
    name = f"{rank}-{attempt}-{os.getpid()}"
    (Path(sys.argv[1]) / name).touch()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for step in range(20):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        if attempt == 0 and step == 10 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    (Path(sys.argv[1]) / f"ok-{name}").touch()


if __name__ == "__main__":
    main()
