"""Out to Hugging Face's format and back, and comparing what is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointMismatchError, CheckpointPathError
from remesh.checkpoint.formats.safetensors_format import plan_export
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.checkpoint.run.safetensors import export, load_safetensors, open_safetensors
from remesh.checkpoint.run.stored_values import bands_of, compare, read_box
from remesh.dist_checkpointing import ShardedTensor
from remesh.layout import Box

STATE = {
    "a.w": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "a.b": torch.arange(5).to(torch.bfloat16),
    "c": torch.tensor(3),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The first tensor lies in two chunks."""
    directory = tmp_path / "c"
    directory.mkdir()
    halves = [
        ShardedTensor.from_rank_offsets("a.w", half, (1, at, 2)) for at, half in enumerate(STATE["a.w"].split(3, 1))
    ]
    rest = [ShardedTensor.from_rank_offsets(key, STATE[key]) for key in ("a.b", "c")]
    dist_checkpointing.save({"all": halves + rest, "step": 3}, directory)
    return directory


def test_one_file_has_the_name_that_readers_look_for(checkpoint: Path, tmp_path: Path) -> None:
    files = export(open_checkpoint(checkpoint), tmp_path / "out")
    assert list(files) == ["model.safetensors"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype for key, value in STATE.items())


def test_many_files_have_an_index_that_names_each_tensor_once(checkpoint: Path, tmp_path: Path) -> None:
    files = export(open_checkpoint(checkpoint), tmp_path, max_file_bytes=50, rename=lambda key: f"model.{key}")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 * 4 + 5 * 2 + 8
    assert set(index["weight_map"]) == {f"model.{key}" for key in STATE}
    assert {path.name for path in tmp_path.glob("*.safetensors")} == files.keys()
    place = torch.zeros(2, 3, dtype=torch.float64)
    part = ShardedTensor("model.a.w", place, torch.float64, (2, 3), (4, 6), (1, 2), None)
    scalar = ShardedTensor.from_rank_offsets("model.c", torch.tensor(0))
    load_safetensors([part, scalar], tmp_path)
    assert torch.equal(place, STATE["a.w"][1:3, 2:5].double())
    assert scalar.data == 3


def test_a_tensor_longer_than_a_file_gets_one_of_its_own() -> None:
    assert list(plan_export({"a": 1, "big": 100, "b": 1, "c": 1}, 10).values()) == [["a"], ["big"], ["b", "c"]]
    assert plan_export({}) == {}


def test_an_export_overwrites_nothing_and_names_nothing_twice(checkpoint: Path, tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointPathError, match="nothing was overwritten"):
        export(open_checkpoint(checkpoint), tmp_path)
    with pytest.raises(CheckpointMismatchError, match="one tensor per name"):
        export(open_checkpoint(checkpoint), tmp_path / "new", rename=lambda key: "same")


def test_what_a_safetensors_file_lacks_is_told_before_anything_is_filled(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2), "y": torch.ones(2)}, tmp_path / "f.safetensors")
    place = torch.zeros(2)
    x = ShardedTensor.from_rank_offsets("x", place)
    for key, shape, said in (("z", (2,), "not in the checkpoint, 'z'"), ("y", (3,), "Global shape mismatch")):
        with pytest.raises(CheckpointMismatchError, match=said):
            load_safetensors([x, ShardedTensor.from_rank_offsets(key, torch.zeros(shape))], tmp_path)
    assert place.eq(0).all()
    load_safetensors([x], tmp_path / "f.safetensors")
    assert place.eq(1).all()


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": {"x": "../f"}}', '{"weight_map": {"x": 3}}'])
def test_a_bad_index_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointFormatError, match="weight_map"):
        load_safetensors([ShardedTensor.from_rank_offsets("x", torch.zeros(1))], tmp_path)


def test_a_file_of_another_kind_is_told(tmp_path: Path) -> None:
    (tmp_path / "f.safetensors").write_bytes(b"something else")
    with pytest.raises(CheckpointFormatError, match=r"f\.safetensors"):
        load_safetensors([ShardedTensor.from_rank_offsets("x", torch.zeros(1))], tmp_path)


_RANK_FILES = [("shard-00001-model-00001-of-00001", 0), ("shard-00002-model-00001-of-00001", 2), ("renamed", 2)]


@pytest.mark.parametrize(("name", "first_row"), _RANK_FILES)
def test_what_one_rank_of_native_torch_has_written_is_not_taken_for_whole_tensors(
    tmp_path: Path, name: str, first_row: int
) -> None:
    told = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [first_row, 0]}}), "DCP_VERSION": "1.0"}
    save_file({"w": torch.ones(2, 3)}, tmp_path / f"{name}.safetensors", told)
    for place in (tmp_path, tmp_path / f"{name}.safetensors"):
        with pytest.raises(CheckpointFormatError, match=r"what one rank .* held of 1 tensors.*enable_consolidation"):
            open_safetensors(place)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_that_native_torch_has_put_together_are_read(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"w": 1})
    dcp.save({"w": torch.ones(2, 3)}, storage_writer=writer, no_dist=True)
    assert torch.equal(read_box(open_safetensors(tmp_path), "w"), torch.ones(2, 3))


def test_values_are_compared_whatever_the_cut(checkpoint: Path, tmp_path: Path) -> None:
    remesh.save({"a": {"w": STATE["a.w"], "b": STATE["a.b"].float()}, "c": torch.tensor([3])}, tmp_path / "o")
    left, right = open_checkpoint(checkpoint), open_checkpoint(tmp_path / "o")
    assert compare(left, right, "a.w", band_bytes=32) is None
    other_dtype, other_shape = compare(left, right, "a.b"), compare(left, right, "c")
    assert other_dtype is not None
    assert (other_dtype.what, other_dtype.num_elements) == ("dtype bfloat16 and float32", 0)
    assert other_shape is not None
    assert other_shape.what == "shape () and (1,)"


def test_differences_are_counted_and_nan_equals_nan(tmp_path: Path) -> None:
    one, other = torch.zeros(10), torch.zeros(10)
    one[3], other[3], other[4], other[9] = torch.nan, torch.nan, 2.0, -3.0
    remesh.save({"x": one}, tmp_path / "a")
    remesh.save({"x": other}, tmp_path / "b")
    found = compare(open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b"), "x", band_bytes=12)
    assert found is not None
    assert (found.num_elements, found.largest) == (2, 3.0)
    assert compare(open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "a"), "x") is None


def test_bands_are_bounded_and_make_up_the_tensor(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    stored = opened.manifest.tensors["a.w"]
    bands = list(bands_of(stored.dtype, stored.global_shape, 30))
    assert all(box.size * 4 <= 30 for box in bands)
    assert sum(box.size for box in bands) == 24
    assert torch.equal(read_box(opened, "a.w", Box((1, 2), (3, 5))), STATE["a.w"][1:3, 2:5])
    assert [str(box) for box in bands_of("int64", ())] == [str(Box((), ()))]


def test_a_snapshot_in_the_cache_of_hugging_face_is_read_through_its_links(tmp_path: Path) -> None:
    """As ``huggingface_hub`` lays it out: files of a snapshot are links to blobs, which all snapshots share."""
    snapshot, blobs = (tmp_path / "hub" / "models--a--b" / name for name in ("snapshots/0f1e", "blobs"))
    for place in (snapshot, blobs, tmp_path / "elsewhere"):
        place.mkdir(parents=True)
    save_file(STATE, blobs / "4d5c")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4d5c")
    for place in (snapshot, snapshot / "model.safetensors"):
        assert torch.equal(read_box(open_safetensors(place), "a.w"), STATE["a.w"])
    save_file(STATE, tmp_path / "elsewhere" / "4d5c")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "4d5c")
    with pytest.raises(CheckpointFormatError) as caught:
        open_safetensors(snapshot)
    assert caught.value.reason == "escaping-path"


def test_load_fills_an_engines_parameters_from_hugging_faces_files_as_its_loader_would(tmp_path: Path) -> None:
    whole = {
        name: torch.randn(rows, 6).to(torch.bfloat16) for name, rows in (("q", 8), ("k", 4), ("v", 4), ("kv_b", 8))
    }
    for name, tensor in whole.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")

    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        into["qkv"].copy_(torch.cat([given[name].chunk(2)[1] for name in "qkv"]))
        into["w_uk_t"].copy_(given["kv_b"][:4].T)
        into["w_uv"].copy_(given["kv_b"][4:])

    made = {"qkv": torch.zeros(8, 6), "w_uk_t": torch.zeros(6, 4), "w_uv": torch.zeros(4, 6)}
    expected = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    load(whole, expected)
    bound = remesh.record(load, {name: tuple(tensor.shape) for name, tensor in whole.items()}, made).bind(made)
    remesh.load(dict(bound.pieces), tmp_path)
    bound.copy()
    assert all(made[name].equal(tensor) for name, tensor in expected.items())
    with pytest.raises(CheckpointMismatchError, match="'more'"):
        remesh.load({"more": torch.zeros(1)}, tmp_path)
