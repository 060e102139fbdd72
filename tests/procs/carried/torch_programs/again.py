"""A script that is not the process of its rank at once: it starts itself again (exec), or makes ranks in a child.

HOW [STEPS]
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank: int, num_steps: int) -> None:
    dist.init_process_group("gloo")
    for step in range(num_steps):
        total = torch.tensor([1.0 + step])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(step, total.item(), flush=True)
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    how, num_steps = sys.argv[1], int(sys.argv[2])
    match how:
        case "exec":
            os.execv(sys.executable, [sys.executable, "-u", __file__, "now", str(num_steps)])
        case "child":
            sys.exit(subprocess.run([sys.executable, __file__, "now", str(num_steps)], check=False).returncode)
        case "fork":
            mp.start_processes(train, (num_steps,), nprocs=1, start_method="fork")
        case _:
            train(0, num_steps)
