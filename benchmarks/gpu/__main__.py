"""``python -m benchmarks.gpu [--device cpu]``, by itself or under torchrun, on any number of machines.

    python -m benchmarks.gpu                                    one GPU
    torchrun --nproc-per-node 8 -m benchmarks.gpu               eight
    torchrun --nnodes 2 --nproc-per-node 8 ... -m benchmarks.gpu --folder /shared

On the CPU every row is small, and tells nothing but that the script works. A row that this run cannot have says so by
name; without a GPU all of them do. Rank 0 writes benchmarks/out/gpu.json, from which `python -m benchmarks.gpu.page`
makes docs/gpu.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu import kills, moves, pipelines, saves
from benchmarks.gpu.bench_rank import BenchRank, Compared, NotRun
from benchmarks.report import save_report

ROWS: dict[str, Callable[[BenchRank], Compared]] = {
    "save, GB/s a rank": saves.save,
    "load, GB/s a rank": saves.load,
    "background save, ms blocked": saves.blocked,
    "device to host behind the program, GB/s": saves.device_to_host,
    "reshard of rows to columns, GB/s a rank": moves.reshard,
    "weights of 8B to generators, s": moves.sync_8b,
    "weights of 30B to generators, s": moves.sync_30b,
    "step of a pipeline, ms": pipelines.step,
    "worker killed to next step, s": kills.killed_to_step,
}


def main() -> None:
    """Measure every row on all ranks together."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; on several machines a folder that all share")
    parser.add_argument("--row", action="append", choices=list(ROWS), help="only this one; may be repeated")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        for case in ROWS if os.environ.get("RANK", "0") == "0" else ():
            print(Compared(case, not_run="no GPU").line())
        print("found no CUDA device; --device cpu runs every row small")
        return
    place = BenchRank.join(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        folder: list[str] = [own]
        dist.broadcast_object_list(folder)
        place.folder = Path(folder[0])
        rows = [asdict(_measure(case, row, place, options.row)) for case, row in ROWS.items()]
        places: list[tuple[str, str]] = [("", "")] * place.world_size
        # Hosts of a testbed have one name; their launchers have a number each.
        host = f"{os.uname().nodename} {os.environ.get('GROUP_RANK', '')}"
        dist.all_gather_object(places, (host, place.device_name))
    if place.rank == 0:
        for row in rows:
            print(Compared(**row).line(), flush=True)
        hosts, devices = (sorted(set(each)) for each in zip(*places, strict=True))
        told = {"devices": devices, "world_size": place.world_size, "num_hosts": len(hosts)}
        print(f"written to {save_report('gpu' if options.device == 'cuda' else 'gpu-cpu', rows, **told)}")
    dist.destroy_process_group()


def _measure(
    case: str, row: Callable[[BenchRank], Compared], place: BenchRank, wanted: Sequence[str] | None
) -> Compared:
    if wanted is not None and case not in wanted:
        return Compared(case, not_run="not asked for")
    try:
        found = row(place)
    except NotRun as raised:
        return Compared(case, not_run=str(raised))
    found.case = case
    return found


if __name__ == "__main__":
    main()
