"""Every attack is refused, by every way into a checkpoint: nothing runs, nothing outside is read, the error is ours."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.run.conversion import Format, convert, gather_contents, open_any
from remesh.checkpoint.run.safetensors import open_safetensors
from remesh.checkpoint.storage.checked_file import verify
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from tests.attacks.forge import ATTACKS, MARK, Attack

VALUES = torch.arange(12.0).reshape(6, 2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A good checkpoint without our sums: a stranger has none, or makes them fit."""
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    state = {
        "w": ShardedTensor.from_rank_offsets("w", VALUES),
        "o": ShardedObject("o", {"a": [1]}, (1,), (0,)),
        "step": 1,
    }
    dist_checkpointing.save(state, directory)
    (directory / ".remesh-checksums").unlink()
    return directory


def _load(directory: Path) -> Any:
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6, 2)), "o": ShardedObject("o", None, (1,), (0,))}
    return dist_checkpointing.load(wanted, directory)


WAYS_IN: dict[str, Callable[[Path], Any]] = {
    "load": _load,
    "plain load": lambda directory: remesh.load({"w": torch.zeros(6, 2)}, directory),
    "load_plain_tensors": dist_checkpointing.load_plain_tensors,
    "load_sharded_metadata": dist_checkpointing.load_sharded_metadata,
    "load_common_state_dict": dist_checkpointing.load_common_state_dict,
    "latest_complete": lambda directory: remesh.latest_complete(directory.parent),
    "verify": lambda directory: list(verify(directory)),
    "convert": lambda directory: convert(
        gather_contents([open_any(directory)]), directory.parent / "converted", Format.ZARR
    ),
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_refused_by_every_way_in(checkpoint: Path, attack: Attack) -> None:
    attack(checkpoint)
    refused = set()
    for name, way_in in WAYS_IN.items():
        try:
            way_in(checkpoint)
        except CheckpointingException as raised:
            assert len(str(raised)) < 2000, "a message is for people"
            refused.add(name)
        assert not (checkpoint.parent / MARK).exists(), name
    assert {"load", "convert"} <= refused, f"only {refused} refused it"


def test_without_an_attack_every_way_in_is_open(checkpoint: Path) -> None:
    for way_in in WAYS_IN.values():
        way_in(checkpoint)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 5000,
        b"{}" + b"x" * 10,
        json.dumps({"w": {"dtype": "F32", "shape": [1 << 60, 2], "data_offsets": [0, 1 << 63]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}).encode(),
        json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"}).encode(),
        json.dumps({"w": {"dtype": "os.system", "shape": [2], "data_offsets": [0, 8]}}).encode(),
        json.dumps({"w": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": {"a": 1}, "data_offsets": [0, 8]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}).encode(),
        b'{"w": {"dtype": "F32", "shape": [' + b"1" * 9999 + b'], "data_offsets": [0, 8]}}',
    ],
)
def test_headers_of_safetensors_are_not_believed(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointingException, match="expected a safetensors file"):
        open_safetensors(path)


@pytest.mark.parametrize("length", [0, 9, 1 << 20, 1 << 63])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointingException, match="expected a safetensors file"):
        open_safetensors(path)
