"""The format zarr: what we write others read, and what they write we read, to the element."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError
from remesh.checkpoint.run.housekeeping import list_checkpoints, remove_checkpoint
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.checkpoint.storage import location_of, store_of
from remesh.checkpoint.storage.checked_file import verify
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from remesh.dist_checkpointing.serialization import get_default_load_sharded_strategy
from remesh.dist_checkpointing.strategies.common import save_common
from remesh.dist_checkpointing.strategies.zarr import (
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
    load_zarr_based_sharded_metadata,
)

WHOLE = torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6)


def _quarters(key: str, whole: torch.Tensor, **options: Any) -> list[ShardedTensor]:
    """A matrix as four cells of a 2 x 2 grid, all on this rank."""
    cells = [(row, column) for row in range(2) for column in range(2)]
    return [
        ShardedTensor.from_rank_offsets(
            key, whole.chunk(2, 0)[row].chunk(2, 1)[column].contiguous(), (0, row, 2), (1, column, 2), **options
        )
        for row, column in cells
    ]


def _state() -> dict[str, Any]:
    return {
        "w": dict(enumerate(_quarters("layer.w", WHOLE))),
        "half": ShardedTensor.from_rank_offsets("half", WHOLE[0].to(torch.bfloat16)),
        "scalar": ShardedTensor("scalar", torch.tensor(3.5), torch.float32, (), (), (), None),
        "objects": [ShardedObject("rng/state", {"at": at}, (2,), (at,)) for at in range(2)],
        "step": 4,
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "step-00000004"
    directory.mkdir()
    dist_checkpointing.save(_state(), directory, ("zarr", 1))
    return directory


def _load(directory: Any) -> dict[str, Any]:
    wanted = {
        "w": ShardedTensor.from_rank_offsets("layer.w", torch.zeros(8, 6)),
        "half": ShardedTensor.from_rank_offsets("half", torch.zeros(6, dtype=torch.bfloat16)),
        "scalar": ShardedTensor("scalar", torch.tensor(0.0), torch.float32, (), (), (), None),
        "objects": [ShardedObject("rng/state", None, (2,), (at,)) for at in range(2)],
    }
    loaded = dist_checkpointing.load(wanted, directory)
    assert isinstance(loaded, dict)
    return loaded


def _is_as_saved(loaded: dict[str, Any]) -> bool:
    same = torch.equal(loaded["w"], WHOLE) and torch.equal(loaded["half"], WHOLE[0].to(torch.bfloat16))
    return same and loaded["scalar"] == 3.5 and loaded["objects"] == [{"at": 0}, {"at": 1}] and loaded["step"] == 4


def test_a_state_comes_back_from_every_store(place):
    store_of(location_of(place)).make_directory(location_of(place))
    dist_checkpointing.save(_state(), place, ("zarr", 1))
    assert _is_as_saved(_load(place))
    assert isinstance(get_default_load_sharded_strategy(place), ZarrLoadShardedStrategy)


def test_the_files_are_those_of_the_format(checkpoint):
    names = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert names == {
        *(f"layer.w/{name}" for name in (".zarray", "0.0", "0.1", "1.0", "1.1")),
        *(f"half/{name}" for name in (".zarray", "0")),
        *(f"scalar/{name}" for name in (".zarray", "0")),
        *(f"rng/state/shard_{at}_2.pt" for at in range(2)),
        *("common.pt", "metadata.json", ".remesh-checksums", ".remesh-blocks"),
    }
    found = json.loads((checkpoint / "layer.w/.zarray").read_text())
    assert found == {
        "chunks": [4, 3],
        "compressor": None,
        "dtype": "<f4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": [8, 6],
        "zarr_format": 2,
    }
    assert (checkpoint / "layer.w/1.0").read_bytes() == WHOLE[4:, :3].contiguous().numpy().tobytes()
    assert json.loads((checkpoint / "half/.zarray").read_text())["dtype"] == "bfloat16"
    assert torch.load(checkpoint / "rng/state/shard_1_2.pt", weights_only=True) == {"at": 1}
    assert json.loads((checkpoint / "metadata.json").read_text())["sharded_backend"] == "zarr"


def _open_with_tensorstore(path: Path) -> Any:
    tensorstore = pytest.importorskip("tensorstore")
    return tensorstore.open({"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}).result()


def test_tensorstore_reads_what_we_write(checkpoint):
    assert np.array_equal(_open_with_tensorstore(checkpoint / "layer.w").read().result(), WHOLE.numpy())
    half = _open_with_tensorstore(checkpoint / "half").read().result()
    assert half.dtype.name == "bfloat16" and half.astype(np.float32).tolist() == WHOLE[0].tolist()
    assert float(_open_with_tensorstore(checkpoint / "scalar").read().result()) == 3.5


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "bfloat16", "complex64", "bool"])
def test_we_read_what_tensorstore_writes(tmp_path, dtype):
    tensorstore = pytest.importorskip("tensorstore")
    whole = torch.arange(7 * 5).reshape(7, 5).remainder(5).to(getattr(torch, dtype))
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(tmp_path / "w")},
        "metadata": {"chunks": [3, 2], "compressor": None, "shape": [7, 5], "dimension_separator": "."},
        "dtype": dtype,
        "create": True,
        "store_data_equal_to_fill_value": True,
    }
    values = whole.view(torch.int16).numpy().view("bfloat16") if dtype == "bfloat16" else whole.numpy()
    tensorstore.open(spec).result().write(values).result()
    save_common({"step": 1}, tmp_path)
    save_config(CheckpointingConfig("zarr"), tmp_path)
    wanted = ShardedTensor("w", torch.zeros(4, 3, dtype=whole.dtype), whole.dtype, (4, 3), (7, 5), (2, 1), None)
    loaded = dist_checkpointing.load({"w": wanted}, tmp_path, validate_access_integrity=False)
    assert torch.equal(loaded["w"], whole[2:6, 1:4]) and loaded["step"] == 1
    assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path)["w"], whole)


def test_prepended_axes_are_axes_with_cells_of_one(tmp_path):
    layers = [ShardedTensor.from_rank_offsets("w", WHOLE + at, (0, at, 3), prepend_axis_num=1) for at in range(3)]
    dist_checkpointing.save(dict(enumerate(layers)), tmp_path, ("zarr", 1))
    found = json.loads((tmp_path / "w/.zarray").read_text())
    assert (found["shape"], found["chunks"]) == ([3, 8, 6], [1, 8, 6])
    whole = dist_checkpointing.load_plain_tensors(tmp_path)["w"]
    assert torch.equal(whole, torch.stack([WHOLE, WHOLE + 1, WHOLE + 2]))


def test_what_is_stored_is_listed_without_reading_values(checkpoint):
    found = load_zarr_based_sharded_metadata(checkpoint)
    assert sorted(found) == ["half", "layer.w", "rng/state/shard_0_2", "rng/state/shard_1_2", "scalar"]
    assert found["layer.w"].global_shape == (8, 6)


def test_old_names_of_objects_lack_the_last_size(checkpoint):
    (checkpoint / ".remesh-checksums").unlink()
    for at in range(2):
        (checkpoint / f"rng/state/shard_{at}_2.pt").rename(checkpoint / f"rng/state/shard_{at}_.pt")
    assert _is_as_saved(_load(checkpoint))


def test_lock_directories_of_old_writers_are_ignored(checkpoint):
    (checkpoint / "layer.w.sync").mkdir()
    (checkpoint / "layer.w.sync" / ".zarray").write_text("{}")
    assert _is_as_saved(_load(checkpoint))


def test_other_shapes_are_cut_and_padded_where_the_request_allows(checkpoint):
    wanted = ShardedTensor.from_rank_offsets("layer.w", torch.ones(10, 6), allow_shape_mismatch=True)
    loaded = dist_checkpointing.load({"w": wanted}, checkpoint)
    assert torch.equal(loaded["w"], torch.cat([WHOLE, torch.zeros(2, 6)]))
    with pytest.raises(CheckpointMismatchError, match="Global shape mismatch"):
        dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("layer.w", torch.ones(10, 6))}, checkpoint)


def test_every_file_has_checksums_and_verify_reads_them_all(checkpoint):
    checked = {name for name, _ in verify(checkpoint)}
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert checked == files - {"metadata.json", ".remesh-checksums"}


def test_damage_of_a_cell_names_tensor_file_and_bytes(checkpoint):
    cell = checkpoint / "layer.w/1.0"
    content = bytearray(cell.read_bytes())
    content[5] ^= 1
    cell.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=r"tensor 'layer\.w'.*1\.0 have checksum") as caught:
        _load(checkpoint)
    assert caught.value.reason == "checksum"


@pytest.mark.parametrize("name", ["layer.w/1.0", "layer.w/.zarray", "rng/state/shard_0_2.pt", "layer.w"])
def test_a_missing_file_is_told(checkpoint, name):
    path = checkpoint / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointingException, match=r"layer\.w|rng/state"):
        _load(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        {"compressor": {"id": "zlib"}},
        {"filters": [{"id": "delta"}]},
        {"order": "F"},
        {"dtype": ">f4"},
        {"dtype": [["a", "<f4"]]},
        {"zarr_format": 3},
        {"chunks": [0, 3]},
        {"chunks": [4]},
        {"shape": [1 << 60, 6]},
        {"shape": [-8, 6]},
        {"shape": [8.0, 6]},
        {"shape": None},
        {"dimension_separator": "../"},
    ],
)
def test_arrays_of_another_kind_or_of_sizes_without_files_are_refused(checkpoint, change):
    (checkpoint / ".remesh-checksums").unlink()
    path = checkpoint / "layer.w/.zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointFormatError):
        open_checkpoint(checkpoint)


def test_a_directory_that_leads_out_is_refused(checkpoint, tmp_path):
    (tmp_path / "outside").mkdir()
    shutil.move(checkpoint / "half", tmp_path / "outside" / "half")
    (checkpoint / "half").symlink_to(tmp_path / "outside" / "half")
    with pytest.raises(CheckpointFormatError, match="is a link"):
        _load(checkpoint)


def test_irregular_shards_are_refused_before_anything_is_written(tmp_path):
    uneven = [ShardedTensor("w", torch.zeros(n), torch.float32, (n,), (5,), (at,), None) for at, n in ((0, 3), (3, 2))]
    with pytest.raises(CheckpointMismatchError, match="save it as torch_dist"):
        dist_checkpointing.save(dict(enumerate(uneven)), tmp_path, ZarrSaveShardedStrategy())
    assert list(tmp_path.iterdir()) == []


def _plain(key, *shape):
    return ShardedTensor.from_rank_offsets(key, torch.ones(shape))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ([_plain("w", 3), _plain("w/0", 2)], "storing 'w/0' as zarr: its directory 'w/0' is .* a file of 'w'"),
        ([_plain("w/.zarray/x", 2), _plain("w", 3)], "its directory 'w/.zarray' is .* a file of 'w'"),
        ([_plain("w", 1), ShardedObject("w/0", 5, (1,), (0,))], "storing 'w/0' as zarr: .* a file of 'w'"),
        ([_plain("common.pt", 3)], "its directory 'common.pt' is .* a file of the checkpoint"),
        ([_plain("rng/shard_0_1.pt", 2), ShardedObject("rng", 5, (1,), (0,))], "a file of 'rng'"),
    ],
    ids=["cell", "description", "object", "common data", "file of an object"],
)
def test_a_key_whose_directory_would_be_a_file_of_another_is_refused(tmp_path, state, told):
    with pytest.raises(CheckpointMismatchError, match=told):
        dist_checkpointing.save(dict(enumerate(state)), tmp_path, ("zarr", 1))
    assert not any(path.is_dir() for path in tmp_path.iterdir()), "no array was made"


def test_keys_that_lie_below_others_are_stored_where_their_files_differ(tmp_path):
    keys = {"w": (2, 3), "w/0": (2,), "w/1.0": (2,), "w/v/0.0": (2,), "x": (2,), "x/1": (1,)}
    dist_checkpointing.save({key: _plain(key, *shape) for key, shape in keys.items()}, tmp_path, ("zarr", 1))
    assert {key: tuple(one.shape) for key, one in dist_checkpointing.load_plain_tensors(tmp_path).items()} == keys


def test_flattened_slices_are_stored_as_whole_cells(tmp_path):
    cells = WHOLE.chunk(2, 1)
    slices = [
        ShardedTensor.from_rank_offsets_flat(
            "w", cells[at].reshape(-1)[held].clone(), (8, 3), (1, at, 2), flattened_range=held
        )
        for at in range(2)
        for held in (slice(0, 5), slice(5, 5), slice(5, 24))
    ]
    dist_checkpointing.save(dict(enumerate(slices)), tmp_path, ("zarr", 1))
    found = json.loads((tmp_path / "w/.zarray").read_text())
    assert (found["shape"], found["chunks"]) == ([8, 6], [8, 3])
    assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path)["w"], WHOLE)


def test_an_aborted_save_is_replaced_by_the_next_one(checkpoint):
    (checkpoint / "metadata.json").unlink()
    (checkpoint / ".remesh-save-in-progress").touch()
    (checkpoint / "stale").mkdir()
    shutil.copy(checkpoint / "half/.zarray", checkpoint / "stale")
    dist_checkpointing.save(_state(), checkpoint, ("zarr", 1))
    assert _is_as_saved(_load(checkpoint)) and not (checkpoint / "stale").exists()


def test_housekeeping_knows_the_size_and_removes_it_all(checkpoint):
    (found,) = list_checkpoints(checkpoint.parent)
    assert found.problem == "" and found.num_bytes == sum(
        p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()
    )
    assert remove_checkpoint(checkpoint) == [] and not checkpoint.exists()


def test_flattened_slices_are_read_from_whole_cells(checkpoint):
    held = slice(5, 17)
    flat = ShardedTensor.from_rank_offsets_flat(
        "layer.w", torch.zeros(12), (4, 6), (0, 1, 2), flattened_range=held, replica_id=0
    )
    loaded = dist_checkpointing.load({"w": flat}, checkpoint, validate_access_integrity=False)
    assert torch.equal(loaded["w"], WHOLE[4:].reshape(-1)[held])
