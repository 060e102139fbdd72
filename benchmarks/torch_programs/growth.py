"""Program that measures how long groups take to grow again after a cut, on its slowest rank. Argument: CUTS."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from remesh.carried.torch.cut import GroupsAtCut


def main(num_cuts: int) -> None:
    took_s: list[float] = []
    grow = GroupsAtCut.grow

    def timed(self: GroupsAtCut, prefix: str, address: tuple[str, int], ended: tuple[int, ...]) -> None:
        began_s = time.perf_counter()
        grow(self, prefix, address, ended)
        took_s.append(time.perf_counter() - began_s)

    GroupsAtCut.grow = timed  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    dist.new_subgroups(dist.get_world_size() // 2)
    is_first = dist.get_rank() == 0
    if is_first:
        print("begun", flush=True)
    fewest = torch.zeros(1)
    while fewest < num_cuts:
        fewest = torch.tensor([float(len(took_s))])
        dist.all_reduce(fewest, dist.ReduceOp.MIN)
        time.sleep(0.02)
    slowest_s = torch.tensor(took_s[:num_cuts], dtype=torch.float64)
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    if is_first:
        print(json.dumps(slowest_s.tolist()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
