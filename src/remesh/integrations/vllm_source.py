"""Trainer weights for vLLM: shards with their boxes; nothing is gathered."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from remesh.foundation.errors import ConfigError
from remesh.integrations.host_programs import check_host
from remesh.layout import Shard as HeldBox
from remesh.layout.from_torch import Piece
from remesh.layout.placement import Replicate, Split, boxes_at

check_host("vllm", (0, 33))

from vllm.distributed.weight_transfer.base import (  # noqa: E402 - what is missing is reported first
    ModuleSource,
    ParamMeta,
    Shard,
)


class ShardedModule(ModuleSource):
    """A ``ModuleSource`` of vLLM that gathers nothing, for any placements: FSDP2 with tensor parallelism, partial."""

    only: Collection[str] | None = None
    """Names of the tensors that the next updates bring, the same on every trainer rank; None for all."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._sharded = module

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters as they are, DTensors with their layouts."""
        held = dict(self._sharded.named_parameters())
        if strange := sorted(set(self.only or ()) - held.keys()):
            raise ConfigError(f"updating weights: the source has no parameters {strange}, expected names of its module")
        for name, parameter in held.items():
            is_here = not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is not None
            if is_here and (self.only is None or name in self.only):
                yield name, parameter


def held_by(tensor: torch.Tensor, meta: ParamMeta, rank: int) -> torch.Tensor | Piece:
    """A tensor that a source yields, with its box by the source's metadata."""
    if isinstance(tensor, DTensor) or meta.owners is None or meta.placements is None:
        return tensor
    coordinate = [int(at) for at in np.unravel_index(meta.owners.index(rank), meta.mesh_shape)]
    placements = tuple(Split(one.dim) if isinstance(one, Shard) else Replicate() for one in meta.placements)
    boxes = boxes_at(tuple(meta.shape), tuple(meta.mesh_shape), tuple(coordinate), placements)
    return Piece(tensor.detach(), tuple(meta.shape), tuple(HeldBox(0, *one) for one in boxes))
