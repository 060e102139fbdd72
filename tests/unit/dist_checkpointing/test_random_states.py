"""Random states come back to the bit under other cuts, in memory of any strides; native torch reads all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from remesh import dist_checkpointing
from tests.profiles import seeds
from tests.unit.dist_checkpointing.random_states import Catalogue, State, as_stored, make_catalogue, make_state, same


def by_rank(state: State) -> dict[str, Any]:
    return {f"rank {rank}": parts for rank, parts in enumerate(state.parts)}


def check_loaded(directory: Path, catalogue: Catalogue, seed: int) -> None:
    """Ask for the parts of all ranks in one process; nothing else may change."""
    state = make_state(catalogue, seed, num_ranks=3, filled=False)
    loaded = dist_checkpointing.load(by_rank(state), directory)
    assert isinstance(loaded, dict)
    for rank, expected in enumerate(state.expected):
        found = loaded.get(f"rank {rank}", {})
        assert found.keys() == expected.keys()
        different = [name for name, value in expected.items() if not same(found[name], value)]
        assert not different
    assert all(same(memory, wanted) for memory, wanted in state.memory)
    assert same({key: loaded[key] for key in catalogue.common}, catalogue.common)


def check_read_natively(directory: Path, catalogue: Catalogue, saved: State) -> int:
    """The number of keys; each is read by torch, which knows nothing of this package."""
    reader = dcp.FileSystemReader(directory)
    stored = reader.read_metadata().state_dict_metadata
    asked: dict[str, Any] = {}
    for key, kept in stored.items():
        is_tensor = isinstance(kept, TensorStorageMetadata)
        asked[key] = torch.zeros(kept.size, dtype=kept.properties.dtype) if is_tensor else None
    dcp.state_dict_loader._load_state_dict(asked, reader, no_dist=True)
    wholes: dict[str, Any] = {whole.key: as_stored(whole, saved.stored_shapes) for whole in catalogue.wholes}
    for key, array in catalogue.objects.items():
        shape = ".".join(map(str, array.shape))
        wholes |= {f"{key}/shard_{'.'.join(map(str, at))}_{shape}": [value] for at, value in np.ndenumerate(array)}
    assert asked.keys() == wholes.keys()
    assert not [key for key, value in wholes.items() if not same(asked[key], value)]
    return len(asked)


def check_round_trips(directory: Path, seed: int) -> None:
    catalogue = make_catalogue(seed)
    saved = make_state(catalogue, 10_000 + seed, num_ranks=2, filled=True)
    directory.mkdir()
    dist_checkpointing.save({**by_rank(saved), **catalogue.common}, directory)
    for again in range(3):
        check_loaded(directory, catalogue, 20_000 + 10 * seed + again)
    assert check_read_natively(directory, catalogue, saved) > len(catalogue.wholes)


@pytest.mark.parametrize("seed", seeds(24, quick=8))
def test_a_random_state_comes_back_to_the_bit_under_other_cuts(tmp_path: Path, seed: int) -> None:
    check_round_trips(tmp_path / "checkpoint", seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_a_thousand_random_states_come_back(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 100):
        check_round_trips(tmp_path / str(seed), seed)
