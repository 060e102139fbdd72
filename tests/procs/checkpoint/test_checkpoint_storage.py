"""Several ranks keep their checkpoint in a store of objects."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import remesh
from remesh.checkpoint.storage import location_of, store_of
from tests.unit.checkpoint.stores import BUCKET, object_store


def _state(placement) -> dict[str, object]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(40 * 6, dtype=torch.float32).reshape(40, 6)
    return {"w": distribute_tensor(whole, mesh, [placement]), "step": 7}


def _save(environment: Mapping[str, str], place: str) -> list[str]:
    os.environ.update(environment)
    remesh.save(_state(Shard(0)), place)
    directory = location_of(place)
    return [entry.name for entry in store_of(directory).entries(directory)]


def _load(environment: Mapping[str, str], place: str) -> bool:
    os.environ.update(environment)
    wanted = _state(Shard(1))
    expected = wanted["w"].full_tensor().clone()
    wanted["w"].to_local().zero_()
    loaded = remesh.load(wanted, place)
    return bool(torch.equal(loaded["w"].redistribute(placements=[Replicate()]).to_local(), expected))


def _fail_to_load(environment: Mapping[str, str], place: str) -> str:
    os.environ.update(environment)
    try:
        remesh.load(_state(Shard(0)), place)
    except remesh.Error as raised:
        return f"{type(raised).__name__}: {raised}"
    return "loaded"


def test_ranks_save_to_and_load_from_a_store_of_objects_under_another_mesh(ranks):
    with object_store() as environment:
        place = f"s3://{BUCKET}/run/step-00000007"
        names = ranks.run(_save, world_size=4, args=(environment, place))[0]
        assert {"metadata.json", ".metadata", "__0_0.distcp", "__3_0.distcp"} <= set(names)
        assert ranks.run(_load, world_size=2, args=(environment, place)) == [True, True]
        told = ranks.run(_fail_to_load, world_size=2, args=(environment, f"s3://{BUCKET}/run/missing"))
        assert len(set(told)) == 1 and "does not exist" in told[0]
