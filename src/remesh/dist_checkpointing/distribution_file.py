"""How does a job that starts again know the shards of all ranks without asking? From a file of the last time.

The file holds what each rank of a group has told of its shards, as JSON; what several ranks have told stands in it
once. What follows from that is computed anew. It is used only if every rank finds its own shards in it as they are now,
and all ranks have read the same file: one short gather tells. So a file that does not fit, is damaged or is not there
on some rank costs that gather and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from remesh.checkpoint.run.steps import take_first_step
from remesh.checkpoint.storage import Directory, Location, location_of, store_of
from remesh.comm.gather import Group, group_rank, group_size, step_together

PG_DIST_CACHE_FILE_PREFIX = "pg_dist"
_VERSION = 2


def recall(folder: Directory, describe: Callable[[], list[Any]], group: Group, doing: str) -> list[list[Any]] | None:
    """What each rank told, by rank, if the file in ``folder`` fits on all ranks; else None. Called by every rank."""

    def look() -> tuple[list[list[Any]] | None, str | None]:
        ranks, digest = _read(_path(folder, group), group_size(group))
        mine = json.loads(json.dumps(describe()))
        return ranks, digest if ranks is not None and ranks[group_rank(group)] == mine else None

    done = step_together(look, group, doing, tell=lambda found: found[1])
    digests = set(done.told)
    return done.mine[0] if len(digests) == 1 and None not in digests else None


def keep(folder: Directory, ranks: list[list[Any]], group: Group, doing: str) -> None:
    """Write what each rank told for the next job. Called by every rank; the first one writes."""

    def write() -> None:
        store_of(location_of(folder)).make_directory(location_of(folder))
        parts = {id(part): part for told in ranks for part in told}
        numbers = {name: number for number, name in enumerate(parts)}
        by_number = [[numbers[id(part)] for part in told] for told in ranks]
        content = {"version": _VERSION, "parts": list(parts.values()), "ranks": by_number}
        path = _path(folder, group)
        store_of(path).put(path, json.dumps(content).encode())

    take_first_step(write, group, doing)


def _path(folder: Directory, group: Group) -> Location:
    lowest = min(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    return location_of(folder) / f"{PG_DIST_CACHE_FILE_PREFIX}_{lowest}.json"


def _read(path: Location, num_ranks: int) -> tuple[list[list[Any]] | None, str | None]:
    try:
        content = store_of(path).read(path)
        found = json.loads(content)
        parts, by_number = (found["parts"], found["ranks"]) if found["version"] == _VERSION else ([], [])
        ranks = [[parts[number] for number in told] for told in by_number]
    except (OSError, ValueError, LookupError, TypeError):  # it is a cache: what cannot be read is as good as absent
        return None, None
    if len(ranks) != num_ranks:
        return None, None
    return ranks, hashlib.sha256(content).hexdigest()
