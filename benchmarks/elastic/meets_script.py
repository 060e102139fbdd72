"""A plain script that meets with gloo and adds numbers up; rank 1 is killed in the first attempt.

Usage: meets_script.py FOLDER. Each attempt of each rank leaves an empty file ``<rank>-<attempt>-<pid>`` there, the one
that is killed another one, ``killed``, and one that has come through ``ok-<rank>-<attempt>-<pid>``.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    attempt = len(list(folder.glob(f"{rank}-*")))
    name = f"{rank}-{attempt}-{os.getpid()}"
    (folder / name).touch()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for step in range(20):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        if attempt == 0 and step == 10 and rank == 1:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    (folder / f"ok-{name}").touch()


if __name__ == "__main__":
    main()
