"""What was damaged after it was written is found before it is used, or is not needed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats import fetch
from remesh.checkpoint.plan.manifest import Extent
from remesh.checkpoint.run import reader
from remesh.checkpoint.run.reader import open_checkpoint, plan_fill
from remesh.checkpoint.storage import integrity
from remesh.checkpoint.storage.checked_file import verify
from remesh.checkpoint.storage.integrity import (
    CHECKSUMS_FNAME,
    check_sha256_manifest,
    read_checksums,
    write_sha256_manifest,
)
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from remesh.layout import Box


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.randn(40, 30, generator=generator)),
        "b": ShardedTensor.from_rank_offsets("b", torch.randn(7, generator=generator).to(torch.bfloat16)),
        "o": ShardedObject("o", {"a": [1, 2]}, (1,), (0,)),
        "step": 17,
    }


def wanted() -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(40, 30)),
        "b": ShardedTensor.from_rank_offsets("b", torch.zeros(7, dtype=torch.bfloat16)),
        "o": ShardedObject("o", None, (1,), (0,)),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "c"
    directory.mkdir()
    dist_checkpointing.save(state(), directory)
    return directory


def is_as_saved(loaded: dict[str, Any]) -> bool:
    saved = state()
    same = [torch.equal(loaded[key], saved[key].data) for key in ("w", "b")]
    return all(same) and loaded["o"] == saved["o"].data and loaded["step"] == 17


def spoil(checkpoint: Path, chance: random.Random) -> str:
    path = chance.choice(sorted(checkpoint.iterdir()))
    content = bytearray(path.read_bytes())
    if chance.random() < 0.2:
        path.write_bytes(content[: chance.randrange(len(content))])
        return f"{path.name} cut"
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"{path.name} flipped at {at} of {len(content)}"


@pytest.mark.parametrize("num_tries", [300, pytest.param(4000, marks=pytest.mark.long)])
def test_any_damage_is_told_or_harmless(checkpoint: Path, num_tries: int) -> None:
    chance = random.Random(num_tries)
    num_told = 0
    for number in range(num_tries):
        spoilt = checkpoint.parent / f"spoilt{number}"
        shutil.copytree(checkpoint, spoilt)
        what = spoil(spoilt, chance)
        try:
            loaded = dist_checkpointing.load(wanted(), spoilt)
        except CheckpointingException as raised:
            assert str(spoilt) in str(raised), what
            num_told += 1
        else:
            assert isinstance(loaded, dict)
            assert is_as_saved(loaded), what
        shutil.rmtree(spoilt)
    assert num_told > num_tries / 2


def test_damage_names_the_tensor_the_file_and_the_bytes(checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    extent = open_checkpoint(checkpoint).manifest.tensors["w"].chunks[0].extent
    content[extent.file_start + 1000] ^= 4
    data.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="tensor 'w'.*bytes 0 to .*__0_0.distcp.*checksum") as caught:
        dist_checkpointing.load(wanted(), checkpoint)
    assert caught.value.reason == "checksum"
    with pytest.raises(CheckpointFormatError, match="__0_0.distcp"):
        list(verify(checkpoint))


def test_swapped_files_are_told(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        remesh.save({"w": torch.full((5,), value), "step": 1}, tmp_path / name)
    shutil.copy(tmp_path / "b" / "__0_0.distcp", tmp_path / "a")
    with pytest.raises(CheckpointFormatError, match="__0_0.distcp"):
        remesh.load({"w": torch.zeros(5)}, tmp_path / "a")


def test_only_the_blocks_that_are_read_are_checked(tmp_path: Path) -> None:
    w = torch.arange(1024 * 1024, dtype=torch.float32).reshape(1024, 1024)
    remesh.save({"w": w}, tmp_path)
    data = tmp_path / "__0_0.distcp"
    with data.open("r+b") as file:
        file.seek(3 << 20)
        file.write(b"damage")
    ours = torch.zeros(256, 1024)
    part = ShardedTensor("w", ours, torch.float32, (256, 1024), (1024, 1024), (0, 0), None)
    dist_checkpointing.load({"w": part}, tmp_path, validate_access_integrity=False)
    assert torch.equal(ours, w[:256])
    with pytest.raises(CheckpointFormatError, match="checksum"):
        remesh.load({"w": torch.zeros(1024, 1024)}, tmp_path)


def test_the_rest_loads_without_the_file_of_checksums(checkpoint: Path) -> None:
    (checkpoint / CHECKSUMS_FNAME).unlink()
    assert is_as_saved(dist_checkpointing.load(wanted(), checkpoint))  # type: ignore[arg-type]
    assert not read_checksums(checkpoint).entries
    assert list(verify(checkpoint)) == []


@pytest.mark.parametrize("content", [b"", b"{}\n00000000\n", b'{"version": 2, "files": {}}\n', b"[]\n"])
def test_a_bad_file_of_checksums_is_told(checkpoint: Path, content: bytes) -> None:
    (checkpoint / CHECKSUMS_FNAME).write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=CHECKSUMS_FNAME):
        dist_checkpointing.load(wanted(), checkpoint)


def test_verifying_reads_every_byte_of_a_good_checkpoint(checkpoint: Path) -> None:
    num_bytes = sum(count for _, count in verify(checkpoint))
    extents = list(open_checkpoint(checkpoint).manifest.extents())
    assert num_bytes > sum(extent.length_bytes for extent in extents)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_flip_in_a_foreign_blob_is_told_by_the_checksum_of_zip(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(1000.0)}, checkpoint_id=tmp_path, no_dist=True)
    data = tmp_path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[2000] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="checksum"):
        remesh.load({"w": torch.zeros(1000)}, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "box", [Box((0, 0), (300, 400)), Box((7, 0), (90, 400)), Box((0, 3), (300, 5)), Box((2, 9), (3, 10))]
)
def test_any_part_arrives_in_any_memory(tmp_path: Path, box: Box, dtype: torch.dtype) -> None:
    w = torch.arange(300 * 400, dtype=torch.float32).reshape(300, 400)
    remesh.save({"w": w}, tmp_path / "ours")
    dcp.save({"w": w.t().contiguous().t()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for directory in (tmp_path / "ours", tmp_path / "theirs"):
        checkpoint = open_checkpoint(directory, allow_native=True)
        for place in (torch.zeros(box.shape, dtype=dtype), torch.zeros(*box.shape[::-1], dtype=dtype).t()):
            tensor = ShardedTensor("w", place, dtype, box.shape, (300, 400), box.start, None)
            reader.run_fill(checkpoint, plan_fill(checkpoint, [tensor]))
            assert torch.equal(place, w[box.slices()].to(dtype))


def test_rows_are_read_without_the_rest(tmp_path: Path) -> None:
    w = torch.zeros(4096, 1024)
    remesh.save({"w": w}, tmp_path)
    chunk = open_checkpoint(tmp_path).manifest.tensors["w"].chunks[0]
    rows = Box((512, 0), (1024, 1024))
    target = fetch.Destination(rows, torch.zeros(rows.shape))
    num_read = fetch.fetch(
        read_checksums(tmp_path), [fetch.ChunkRead(chunk.extent, "float32", (4096, 1024), (target,), "w")]
    )
    assert num_read <= 1.1 * rows.size * 4 + (64 << 10)


def test_small_neighbours_are_fetched_together() -> None:
    extents = [Extent("f", at * 100, 90) for at in range(4)] + [Extent("f", 10**6, 90), Extent("f", 2 * 10**6, 2 << 20)]
    assert fetch._aheads(extents, 64 << 10) == [390, 390, 390, 390, 10**6 + 90, 0]


def test_sha256_sums_are_written_and_checked(checkpoint: Path) -> None:
    write_sha256_manifest(checkpoint)
    check_sha256_manifest(checkpoint)
    found = json.loads((checkpoint / "integrity.json").read_text())
    assert found["algorithm"] == "sha256"
    assert set(found["files"]) == {path.name for path in checkpoint.iterdir()} - {"integrity.json"}
    (checkpoint / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointFormatError, match=r"metadata\.json"):
        check_sha256_manifest(checkpoint)
    (checkpoint / "integrity.json").unlink()
    with pytest.raises(CheckpointFormatError, match="verify_integrity"):
        check_sha256_manifest(checkpoint)


@pytest.mark.parametrize("is_behind", [False, True])
def test_sums_of_data_files_are_computed_while_they_are_written(tmp_path, monkeypatch, is_behind) -> None:
    read_again: list[str] = []
    sum_of = integrity._sha256_of

    def told(path: Path) -> str:
        read_again.append(path.name)
        return sum_of(path)

    monkeypatch.setattr(integrity, "_sha256_of", told)
    large = {"w": ShardedTensor.from_rank_offsets("w", torch.randn(700, 1000))}
    saved = {**state(), **large}
    request = dist_checkpointing.save(saved, tmp_path, async_sharded_save=is_behind, verify_integrity=True)
    if request is not None:
        request.execute_sync()
    assert "__0_0.distcp" not in read_again and "common.pt" in read_again
    check_sha256_manifest(tmp_path)
    assert "__0_0.distcp" in json.loads((tmp_path / "integrity.json").read_text())["files"]


def test_only_the_save_that_asks_for_sums_computes_them(tmp_path, monkeypatch) -> None:
    strategy = TorchDistSaveShardedStrategy()
    for name, asks in (("a", True), ("b", False)):
        (tmp_path / name).mkdir()
        dist_checkpointing.save(state(), tmp_path / name, strategy, verify_integrity=asks)
        assert (tmp_path / name / "integrity.json").exists() == asks
