"""verl's own registry, base class and order of calls with our engine: actors and rollouts, in groups of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

NUM_ACTORS, BUCKET_BYTES = 2, 4 * 300
SHAPES = {
    "model.embed_tokens.weight": (33, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.mlp.experts.gate_up_proj": (3, 8, 5),
    "model.norm.weight": (1,),
}


def _whole(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _class_shard_spec() -> Any:
    """verl's own class, by its file: the package around it imports every training engine that there is."""
    found = importlib.util.find_spec("verl")
    assert found is not None and found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0], "workers", "engine", "spec.py")
    spec = importlib.util.spec_from_file_location("verl_shard_spec", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verl_shard_spec"] = module
    spec.loader.exec_module(module)
    return module.ShardSpec


class _TrainingEngine:
    """What verl's training engines give: whole tensors one by one, and local parts with their ``ShardSpec``."""

    def __init__(self, version: int) -> None:
        mesh = init_device_mesh("cpu", (NUM_ACTORS,))
        placements = ([Shard(0)], [Shard(1)], [Shard(1)], [Replicate()])
        self.held = {
            name: distribute_tensor(tensor, mesh, how)
            for (name, tensor), how in zip(_whole(version).items(), placements, strict=True)
        }

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.full_tensor()) for name, tensor in self.held.items())

    def get_per_tensor_param_shard(self) -> tuple[Iterator[tuple[str, torch.Tensor, Any]], None]:
        shard_spec = _class_shard_spec()

        def local(tensor: DTensor) -> torch.Tensor:
            return tensor.to_local().reshape(-1)

        return ((name, local(tensor), shard_spec.from_param(tensor)) for name, tensor in self.held.items()), None


def _worker(rank: int, path: str, backend: str, rounds: list[int], results: Any) -> None:
    """An actor, or a rollout worker: their default groups know nothing of each other. A round has so many rollouts."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry  # noqa: PLC0415 - a host may be missing

    torch.set_num_threads(1)
    is_actor = rank < NUM_ACTORS
    board = dist.FileStore(path)
    own = dist.PrefixStore("actors" if is_actor else f"rollout {rank}", board)
    dist.init_process_group("gloo", store=own, rank=rank if is_actor else 0, world_size=NUM_ACTORS if is_actor else 1)
    engine = CheckpointEngineRegistry.new(backend, bucket_size=BUCKET_BYTES, is_master=rank == 0)
    groups = []
    for at, num_rollouts in enumerate(rounds):
        if rank >= NUM_ACTORS + num_rollouts:
            continue
        told = _meet(engine, board, at, rank, num_rollouts)
        if rank == 0:
            time.sleep(0.5)  # so that the others come first, to a store in which the same members may have met before
        engine.init_process_group(**told)
        groups.append(engine._group)
        if is_actor:
            training = _TrainingEngine(at)
            given = training if backend == "delta_sharded" else training.get_per_tensor_param()
            sent = asyncio.run(engine.send_weights(given, global_steps=at))
            assert sent["checkpoint_engine/payload_mbytes"] * (1 << 20) == sum(
                4 * t.numel() for t in _whole(at).values()
            )
        else:
            found, expected = asyncio.run(_receive(engine)), _whole(at)
            assert list(found) == list(expected) and all(found[name].equal(expected[name]) for name in found)
        engine.finalize()
    results.put((rank, len({id(group) for group in groups}), engine._resharder.num_reused))
    dist.destroy_process_group()


async def _receive(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in engine.receive_weights()}


def _meet(engine: Any, board: dist.Store, at: int, rank: int, num_rollouts: int) -> dict[str, Any]:
    """What verl's manager does by ray: gather what all prepared, build the topology, tell each its part."""
    size = NUM_ACTORS + num_rollouts
    board.set(f"{at}/{rank}", repr(engine.prepare()))
    prepared = [eval(board.get(f"{at}/{one}")) for one in range(size)]
    actors, rollouts = type(engine).build_topology(NUM_ACTORS, num_rollouts, prepared)
    mine, number = (actors, rank) if rank < NUM_ACTORS else (rollouts, rank - NUM_ACTORS)
    assert {len(value) for value in mine.values()} == {NUM_ACTORS if mine is actors else num_rollouts}
    return {key: value[number] for key, value in mine.items()}


def _run(worker: Callable[..., None], num: int, *args: Any) -> list[Any]:
    import remesh.integrations.verl_shards  # noqa: F401, PLC0415 - as verl does with custom_backend_module

    results = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (f"{folder}/board", *args, results), num, start_method="fork")
    return sorted(results.get() for _ in range(num))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["remesh", "delta_sharded"])
def test_rollouts_that_join_and_leave_get_every_tensor_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told = _run(_worker, NUM_ACTORS + 2, backend, [1, 1, 2, 1])
    assert [groups for _, groups, _ in told] == [3, 3, 3, 1], "the same members go on in the same group"


def _actor_that_fails(rank: int, path: str, results: Any) -> None:
    from remesh.foundation.errors import Error  # noqa: PLC0415
    from remesh.integrations.verl import RemeshCheckpointEngine  # noqa: PLC0415

    board = dist.FileStore(path)
    own = dist.PrefixStore(f"alone {rank}", board)
    dist.init_process_group("gloo", store=own, rank=0, world_size=1)
    engine = RemeshCheckpointEngine(1000, is_master=rank == 0)
    engine.init_process_group(**_meet(engine, board, 0, rank, 1))

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "one", torch.ones(200)
        if rank == 1:
            raise ValueError("the shard of actor 1 is lost")
        yield "two", torch.ones(200)

    try:
        asyncio.run(engine.send_weights(weights()) if rank < NUM_ACTORS else _receive(engine))
        results.put("nothing raised")
    except (ValueError, Error) as raised:
        results.put(f"{type(raised).__name__}: {raised}")


@pytest.mark.timeout(400)
def test_what_one_actor_raises_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told = _run(_actor_that_fails, NUM_ACTORS + 1)
    assert len(set(told)) == 1 and "the shard of actor 1 is lost" in told[0], told


def _rollout_that_breaks_off_once(rank: int, path: str, results: Any) -> None:
    from remesh.foundation.errors import Error  # noqa: PLC0415
    from remesh.integrations.verl import RemeshCheckpointEngine  # noqa: PLC0415

    board = dist.FileStore(path)
    own = dist.PrefixStore(f"alone {rank}", board)
    dist.init_process_group("gloo", store=own, rank=0, world_size=1)
    engine = RemeshCheckpointEngine(1000, is_master=rank == 0, timeout_s=30)

    async def take_none() -> None:
        async for name, _ in engine.receive_weights():
            raise ValueError(f"no room for {name}")

    told = []
    for at in range(2):
        engine.init_process_group(**_meet(engine, board, at, rank, 1))
        weights = ((name, torch.full((200,), float(at))) for name in ("one", "two", "three"))
        try:
            if rank < NUM_ACTORS:
                told.append(asyncio.run(engine.send_weights(weights)))
            else:
                found = asyncio.run(_receive(engine) if at else take_none())
                told.append(all(tensor.eq(at).all() for tensor in found.values()) and len(found))
        except (ValueError, Error) as raised:
            told.append(type(raised).__name__)
    results.put((rank, told))


@pytest.mark.timeout(400)
def test_after_a_rollout_that_broke_off_the_next_update_meets_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told = dict(_run(_rollout_that_breaks_off_once, NUM_ACTORS + 1))
    sent = {"checkpoint_engine/payload_mbytes": 3 * 800 / (1 << 20)}
    assert told == {0: ["PeerError", sent], 1: ["PeerError", sent], 2: ["ValueError", 3]}


def test_shards_that_an_engine_cuts_by_rules_of_its_own_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from remesh.foundation.errors import ConfigError  # noqa: PLC0415
    from remesh.integrations.verl import RemeshCheckpointEngine  # noqa: PLC0415

    spec = SimpleNamespace(full_shape=(2,), place="rows of rank 0", to_hf_chunk=None, mesh=None)
    training = SimpleNamespace(get_per_tensor_param_shard=lambda: (iter([("w", torch.ones(2), spec)]), None))
    engine = RemeshCheckpointEngine(1000)
    with pytest.raises(ConfigError, match="is in no process group yet"):
        asyncio.run(engine.send_weights(training))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_moves", lambda: None)
        with pytest.raises(ConfigError, match="tensor 'w' is cut or named by rules"):
            asyncio.run(engine.send_weights(training))


@pytest.mark.parametrize("name", ["q_proj.base_layer.weight", "q_proj.lora_A.default.weight", "head.modules_to_save.x"])
def test_shards_of_an_adapter_that_is_not_merged_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from remesh.foundation.errors import ConfigError  # noqa: PLC0415
    from remesh.integrations.verl import RemeshCheckpointEngine  # noqa: PLC0415

    held = [(f"base_model.model.{name}", torch.ones(2), SimpleNamespace(full_shape=(2,)))]
    training = SimpleNamespace(get_per_tensor_param_shard=lambda: (iter(held), None))
    engine = RemeshCheckpointEngine(1000)
    monkeypatch.setattr(engine, "_moves", lambda: None)
    with pytest.raises(ConfigError, match=r"adapter that is not merged.*lora.merge=True"):
        asyncio.run(engine.send_weights(training))
