"""Load strategy for zarr under its older name; there is one way to read zarr here, and this is it."""

from __future__ import annotations

from remesh.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy


class TensorStoreLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Reads zarr. ``load_directly_on_device`` is accepted: tensors of a request are always filled in place."""

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()
        self.load_directly_on_device = load_directly_on_device
