"""verl's checkpoint engine, with the moves of Remesh: weights from every trainer rank to all rollout workers.

    actor_rollout_ref.rollout.checkpoint_engine.backend=remesh
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=remesh.integrations.verl

verl's trainers yield whole tensors, one after the other, and its rollout workers want whole tensors; between them every
trainer rank sends an equal part of each, so that all their NICs carry the same. With `remesh.integrations.verl_shards`
and ``backend=delta_sharded``, the name for which verl hands over its training engine, trainers send the shards that
they hold, and no trainer rank has a whole tensor.

    buckets   | q_proj k_proj norm | embed_tokens | ...      as many tensors as fit into update_weights_bucket_megabytes
    ranks     actors 0 .. A-1, rollout workers A .. A+R-1: one group beside the default groups of both

When members have changed, or the last update has failed, an update makes a new group; otherwise it uses the same group
and the same plans.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from remesh.comm.gather import step_together
from remesh.foundation.errors import ConfigError
from remesh.groups.beside import join_beside, leave_beside
from remesh.integrations.host_programs import check_host
from remesh.layout import Box, Shard
from remesh.layout.flat import boxes_of_flat_range
from remesh.layout.from_torch import Piece, dtype_name, piece_at, placements_from_torch, torch_dtype
from remesh.resharding import Resharder

check_host("verl", (0, 9))

import ray  # noqa: E402 - what is missing is reported first
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # noqa: E402

_UPDATING = "updating the weights of rollout workers"
_OF_ADAPTER = re.compile(r"\.(lora_\w+|base_layer|modules_to_save)\.")
"""In names of peft's layers."""


@CheckpointEngineRegistry.register("remesh")
class RemeshCheckpointEngine(CheckpointEngine):
    """One per worker. ``engine_kwargs.remesh`` takes ``timeout_s`` and ``device``, that of the tensors that arrive."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, *, timeout_s: float = 600.0, device: str | None = None
    ) -> None:
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._timeout_s = timeout_s
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._own_name = uuid.uuid4().hex
        self._members: Sequence[str] = ()
        self._server: dist.TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._resharder: Resharder | None = None
        self._rank = 0
        self._num_actors = 0

    def prepare(self) -> dict[str, Any]:
        """This worker's description; that of actor rank 0 also has the address where all meet."""
        if not self._is_master:
            return {"name": self._own_name}
        if self._server is None:
            self._server = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        address = ray.util.get_node_ip_address().strip("[]")
        # The same members may meet once more behind others; what they left in the store is not for them.
        return {"name": self._own_name, "address": address, "port": self._server.port, "meeting": uuid.uuid4().hex}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of every worker for `init_process_group`; actors have the first ranks."""
        size, members = actor_wg_world_size + rollout_world_size, [one["name"] for one in metadata]
        place = {key: metadata[0][key] for key in ("address", "port", "meeting")}
        ranks = list(range(size))

        def of(some: list[int]) -> dict[str, list[Any]]:
            common = {"members": members, "num_actors": actor_wg_world_size, "place": place}
            return {"rank": some, **{key: [value] * len(some) for key, value in common.items()}}

        return of(ranks[:actor_wg_world_size]), of(ranks[actor_wg_world_size:])

    def init_process_group(self, rank: int, members: Sequence[str], num_actors: int, place: dict[str, Any]) -> None:
        """Meet the other workers, unless they are those of the last update."""
        if list(members) == list(self._members):
            return
        self._leave()
        store = self._server or dist.TCPStore(place["address"], place["port"], is_master=False)
        self._group = join_beside(store, rank, len(members), meeting=place["meeting"], timeout_s=self._timeout_s)
        self._rank, self._num_actors, self._members = rank, num_actors, list(members)
        self._resharder = Resharder(self._group)

    def finalize(self) -> None:
        """Do nothing: buckets are freed at the end of each update."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send what verl's trainer yields, or the shards of its engine; on every actor."""
        sharded = getattr(weights, "get_per_tensor_param_shard", None)
        buckets = self._buckets(self._equal_parts(weights) if sharded is None else _shards(sharded()[0]))
        num_bytes = 0
        with self._new_to_others_if_it_fails():
            # What verl's generator raises on one actor is raised on all, and in all rollout workers.
            while bucket := self._agree(lambda: next(buckets, {}))[0]:
                self._moves().reshard(bucket, {})
                num_bytes += sum(map(_num_bytes, bucket.values()))
        return {"checkpoint_engine/payload_mbytes": num_bytes / (1 << 20)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Every tensor whole by its name, as verl's rollouts take them, bucket by bucket."""
        with self._new_to_others_if_it_fails():
            while told := self._agree(dict)[1]:
                bucket = {
                    name: torch.empty(shape, dtype=torch_dtype(dtype), device=self._device)
                    for name, shape, dtype in told
                }
                self._moves().reshard({}, bucket)
                for named in bucket.items():
                    yield named

    @contextmanager
    def _new_to_others_if_it_fails(self) -> Iterator[None]:
        """Behind an error, meet the others as a new member: in a new group."""
        try:
            yield
        except BaseException:  # also when the engines that take the tensors have failed
            self._own_name = uuid.uuid4().hex
            raise

    def _moves(self) -> Resharder:
        if self._resharder is None:
            raise ConfigError(
                f"{_UPDATING}: this worker is in no process group yet; verl calls init_process_group first"
            )
        return self._resharder

    def _agree(self, step: Callable[[], dict[str, Piece]]) -> tuple[dict[str, Piece], list[Any]]:
        """This worker's next bucket, and its names, shapes and dtypes as all actors send them; empty at the end."""
        self._moves()
        together = step_together(step, self._group, _UPDATING, tell=_describe)
        actors = together.told[: self._num_actors]
        wrong = [rank for rank, one in enumerate(actors) if one != actors[0]]
        if wrong:
            raise ConfigError(
                f"{_UPDATING}: actor {wrong[0]} sends {_first_difference(actors[wrong[0]], actors[0])}, expected what "
                "actor 0 sends; yield the same tensors in the same order on every actor"
            )
        return together.mine, actors[0]

    def _equal_parts(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Piece]]:
        """This actor's part of every whole tensor, copied, since the next tensor may lie in the same memory."""
        for name, tensor in weights:
            start, stop = (tensor.numel() * one // self._num_actors for one in (self._rank, self._rank + 1))
            shards, at = [], 0
            for box in boxes_of_flat_range(Box.of_shape(tuple(tensor.shape)), start, stop):
                shards.append(Shard(0, box, at))
                at += box.size
            yield name, Piece(tensor.detach().reshape(-1)[start:stop].clone(), tuple(tensor.shape), tuple(shards))

    def _buckets(self, held: Iterator[tuple[str, Piece]]) -> Iterator[dict[str, Piece]]:
        """Buckets of as many tensors as fit, by their whole sizes, so that all actors cut at the same places."""
        bucket: dict[str, Piece] = {}
        filled = 0
        for name, piece in held:
            if bucket and filled + _num_bytes(piece) > self._bucket_bytes:
                yield bucket
                bucket, filled = {}, 0
            bucket[name] = piece
            filled += _num_bytes(piece)
        if bucket:
            yield bucket

    def _leave(self) -> None:
        if self._group is not None:
            leave_beside(self._group)
        self._group, self._resharder, self._members = None, None, ()


def _describe(bucket: Mapping[str, Piece]) -> list[Any]:
    return [[name, list(one.global_shape), dtype_name(one.tensor.dtype)] for name, one in bucket.items()]


def _shards(held: Iterable[tuple[str, torch.Tensor, Any]]) -> Iterator[tuple[str, Piece]]:
    """The shards that verl's engines export: local parts with torch's mesh and placements."""
    for name, local, spec in held:
        shape = tuple(spec.full_shape)
        if _OF_ADAPTER.search(name):
            raise ConfigError(
                f"{_UPDATING}: tensor {name!r} is of an adapter that is not merged, and rollouts would go on without "
                "it; take backend=remesh with model.lora.merge=True, for which verl yields merged weights"
            )
        if spec.place is not None or spec.to_hf_chunk is not None:
            raise ConfigError(
                f"{_UPDATING}: tensor {name!r} is cut or named by rules of its engine's own, expected torch's "
                "placements; take backend=remesh, for which verl yields whole tensors"
            )
        if spec.mesh is None:
            yield name, Piece(local.detach().reshape(shape), shape, (Shard(0, Box.of_shape(shape)),))
            continue
        placements = placements_from_torch(spec.placements)
        yield name, piece_at(local, shape, spec.mesh.shape, spec.mesh.get_coordinate(), placements)


def _num_bytes(piece: Piece) -> int:
    return math.prod(piece.global_shape) * piece.tensor.element_size()


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> str:
    pairs = zip(one, other, strict=False)
    return next((f"{mine} and not {theirs}" for mine, theirs in pairs if mine != theirs), "another number of tensors")
