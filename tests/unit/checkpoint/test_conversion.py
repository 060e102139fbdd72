"""A checkpoint says the same in every format, and who owns a format reads what we wrote."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError, CheckpointPathError
from remesh.checkpoint.run import conversion
from remesh.checkpoint.run.conversion import Format, convert, gather_contents, merge, open_any
from remesh.checkpoint.run.stored_values import compare, read_bands, read_box
from remesh.checkpoint.storage import location_of
from remesh.checkpoint.storage.checked_file import verify
from remesh.cli import main
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

WHOLE = torch.arange(12 * 10, dtype=torch.float32).reshape(12, 10)
COMMON = {"step": 3, "opt": {"lr": 0.1, "betas": [0.9, 0.99], "groups": [{"decay": 1}]}}


def _rows(key: str, whole: torch.Tensor, sizes: tuple[int, ...]) -> list[ShardedTensor]:
    """A tensor in bands of these numbers of rows."""
    starts = [0, *itertools.accumulate(sizes)]
    rest, zeros = tuple(whole.shape[1:]), (0,) * (whole.ndim - 1)
    return [
        ShardedTensor(key, whole[at : at + n].clone(), whole.dtype, (n, *rest), tuple(whole.shape), (at, *zeros), None)
        for at, n in zip(starts, sizes, strict=False)
    ]


def _state() -> dict[str, Any]:
    flat = [slice(0, 7), slice(7, 20)]
    return {
        "w": dict(enumerate(_rows("w", WHOLE, (6, 6)))),
        "uneven": dict(enumerate(_rows("uneven", WHOLE[:, 0].to(torch.bfloat16), (5, 4, 3)))),
        "flat": [
            ShardedTensor.from_rank_offsets_flat(
                "flat", torch.arange(40.0)[cell * 20 :][held].clone(), (4, 5), (0, cell, 2), flattened_range=held
            )
            for cell in range(2)
            for held in flat
        ],
        "empty": ShardedTensor("empty", torch.zeros(0, 3), torch.float32, (0, 3), (0, 3), (0, 0), None),
        "scalar": ShardedTensor("scalar", torch.tensor(7), torch.int64, (), (), (), None),
        "object": ShardedObject("rng", {"seed": [1, 2]}, (1,), (0,)),
        **COMMON,
    }


VALUES = {
    "w": WHOLE,
    "uneven": WHOLE[:, 0].to(torch.bfloat16),
    "flat": torch.arange(40.0).reshape(8, 5),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    dist_checkpointing.save(_state(), directory)
    return directory


def _convert(place: Any, target: Any, to: Format) -> Any:
    convert(gather_contents([open_any(place)]), target, to)
    return open_any(target)


def _values_in(checkpoint: Any) -> dict[str, torch.Tensor]:
    return {key: read_box(checkpoint, key) for key in checkpoint.manifest.tensors}


@pytest.mark.parametrize("to", list(Format))
def test_every_format_holds_the_same_tensors(source, tmp_path, to):
    found = _convert(source, tmp_path / "t", to)
    assert found.format == to.value
    values = _values_in(found)
    assert values.keys() == VALUES.keys()
    assert all(torch.equal(values[key], VALUES[key]) and values[key].dtype == VALUES[key].dtype for key in VALUES)
    assert all(compare(open_any(source), found, key) is None for key in VALUES)


@pytest.mark.parametrize(("first", "then"), list(itertools.permutations(["torch_dist", "zarr", "dcp"], 2)))
def test_ways_there_and_back_keep_objects_and_common_data(source, tmp_path, first, then):
    _convert(source, tmp_path / "one", Format(first))
    _convert(tmp_path / "one", tmp_path / "two", Format(then))
    _convert(tmp_path / "two", tmp_path / "back", Format.TORCH_DIST)
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(12, 10))
    wanted = {"rng": ShardedObject("rng", None, (1,), (0,)), "w": shard}
    loaded = dist_checkpointing.load(wanted, tmp_path / "back")
    assert loaded["rng"] == {"seed": [1, 2]} and torch.equal(loaded["w"], WHOLE)
    groups = {"0": {"decay": 1}} if "dcp" in (first, then) else [{"decay": 1}]  # native torch keeps paths, not lists
    assert {key: loaded[key] for key in COMMON} == {**COMMON, "opt": {**COMMON["opt"], "groups": groups}}
    assert sum(num_bytes for _, num_bytes in verify(tmp_path / "back")) > 0


def test_keys_that_would_share_a_place_in_zarr_are_refused(tmp_path):
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(3)) for key in ("w", "w/0")}
    (tmp_path / "one").mkdir()
    dist_checkpointing.save(state, tmp_path / "one")
    with pytest.raises(CheckpointMismatchError, match="storing 'w/0' as zarr: .* a file of 'w'"):
        _convert(tmp_path / "one", tmp_path / "two", Format.ZARR)


def test_native_torch_reads_what_was_converted_for_it(source, tmp_path):
    _convert(source, tmp_path / "t", Format.DCP)
    state = {"w": torch.zeros(12, 10), "scalar": torch.tensor(0), "step": 0, "opt": {"lr": 0.0, "betas": [0.0, 0.0]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "t", no_dist=True)
    assert torch.equal(state["w"], WHOLE) and state["scalar"] == 7
    assert state["step"] == 3 and state["opt"] == {"lr": 0.1, "betas": [0.9, 0.99]}
    assert not (tmp_path / "t" / "metadata.json").exists()


def test_what_native_torch_wrote_is_converted(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": WHOLE, **COMMON}, checkpoint_id=tmp_path / "native", no_dist=True)
    _convert(tmp_path / "native", tmp_path / "t", Format.TORCH_DIST)
    loaded = remesh.load({"w": torch.zeros(12, 10)}, tmp_path / "t")
    assert torch.equal(loaded["w"], WHOLE) and loaded["step"] == 3 and loaded["opt"]["betas"] == [0.9, 0.99]


def test_the_library_reads_our_safetensors_and_we_read_those_of_the_library(source, tmp_path):
    library = pytest.importorskip("safetensors.torch")
    _convert(source, tmp_path / "t", Format.SAFETENSORS)
    loaded = library.load_file(tmp_path / "t" / "model.safetensors")
    assert loaded.keys() == VALUES.keys() and all(torch.equal(loaded[key], VALUES[key]) for key in VALUES)
    library.save_file(VALUES, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours, theirs = (tmp_path / "t" / "model.safetensors"), (tmp_path / "theirs.safetensors")
    assert ours.read_bytes() == theirs.read_bytes()
    _convert(theirs, tmp_path / "back", Format.TORCH_DIST)
    assert all(compare(open_any(source), open_any(tmp_path / "back"), key) is None for key in VALUES)


def test_a_conversion_keeps_the_cut_and_a_merge_leaves_none(source, tmp_path):
    contents = gather_contents([open_any(source)])
    convert(contents, tmp_path / "kept", Format.TORCH_DIST)
    convert(merge(contents), tmp_path / "merged", Format.TORCH_DIST)
    cuts = {
        name: {key: len(stored.chunks) for key, stored in open_any(tmp_path / name).manifest.tensors.items()}
        for name in ("kept", "merged")
    }
    assert cuts["kept"] == {"w": 2, "uneven": 3, "flat": 2, "empty": 1, "scalar": 1}
    assert set(cuts["merged"].values()) == {1}
    assert all(compare(open_any(source), open_any(tmp_path / "merged"), key) is None for key in VALUES)


def test_a_tensor_in_many_bands_is_the_blob_that_a_save_writes(tmp_path, monkeypatch):
    values = torch.randn(300, 1001)
    remesh.save({"w": values}, tmp_path / "saved")
    monkeypatch.setattr(conversion, "read_bands", lambda *args: read_bands(*args, band_bytes=50_000))
    convert(gather_contents([open_any(tmp_path / "saved")]), tmp_path / "copied", Format.TORCH_DIST)
    name = "__0_0.distcp"
    assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "copied" / name).read_bytes()


def test_files_are_as_long_as_they_may_be(source, tmp_path):
    convert(gather_contents([open_any(source)]), tmp_path / "t", Format.TORCH_DIST, max_file_bytes=3000)
    names = sorted(path.name for path in (tmp_path / "t").glob("*.distcp"))
    assert len(names) > 2 and names[0] == "__0_0.distcp"
    assert all(torch.equal(value, VALUES[key]) for key, value in _values_in(open_any(tmp_path / "t")).items())


def test_checkpoints_with_different_contents_become_one(tmp_path):
    remesh.save({"model": {"w": WHOLE}, "step": 3}, tmp_path / "model")
    remesh.save({"optim": {"m": WHOLE + 1}, "step": 3, "lr": 0.5}, tmp_path / "optim")
    opened = [open_any(tmp_path / name) for name in ("model", "optim")]
    convert(merge(gather_contents(opened)), tmp_path / "all", Format.TORCH_DIST)
    loaded = remesh.load({"model": {"w": torch.zeros(12, 10)}, "optim": {"m": torch.zeros(12, 10)}}, tmp_path / "all")
    assert torch.equal(loaded["optim"]["m"], WHOLE + 1) and torch.equal(loaded["model"]["w"], WHOLE)
    assert (loaded["step"], loaded["lr"]) == (3, 0.5)


def test_contents_that_contradict_each_other_are_refused(tmp_path):
    remesh.save({"w": WHOLE, "step": 3}, tmp_path / "a")
    remesh.save({"v": WHOLE, "step": 4}, tmp_path / "b")
    opened = {name: open_any(tmp_path / name) for name in ("a", "b")}
    with pytest.raises(CheckpointMismatchError, match="1 tensors are in more than one, as 'w'"):
        gather_contents([opened["a"], opened["a"]])
    with pytest.raises(CheckpointMismatchError, match=r"common data at \('step',\) differs"):
        gather_contents([opened["a"], opened["b"]])


@pytest.mark.parametrize("to", list(Format))
def test_nothing_is_overwritten(source, tmp_path, to):
    _convert(source, tmp_path / "t", to)
    before = {path: path.read_bytes() for path in (tmp_path / "t").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointPathError, match="nothing was overwritten"):
        _convert(source, tmp_path / "t", to)
    assert before == {path: path.read_bytes() for path in (tmp_path / "t").rglob("*") if path.is_file()}


@pytest.mark.parametrize("to", [Format.TORCH_DIST, Format.ZARR, Format.DCP])
def test_a_conversion_that_fails_leaves_no_checkpoint(source, tmp_path, to, monkeypatch):
    def fail(num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointPathError, match="No space left"):
        convert(gather_contents([open_any(source)]), tmp_path / "t", to, on_bytes=fail)
    with pytest.raises(remesh.Error):
        open_any(tmp_path / "t")
    _convert(source, tmp_path / "t", to)


def test_conversions_go_from_store_to_store(source, place):
    root = location_of(place)
    _convert(source, root / "z", Format.ZARR)
    _convert(root / "z", root / "s", Format.SAFETENSORS)
    found = _convert(root / "s", root / "t", Format.TORCH_DIST)
    assert all(torch.equal(value, VALUES[key]) for key, value in _values_in(found).items())


def test_every_replica_kept_is_written_once(tmp_path):
    twice = {at: ShardedTensor.from_rank_offsets("w", WHOLE.clone(), replica_id=at) for at in range(2)}
    (tmp_path / "s").mkdir()
    dist_checkpointing.save(twice, tmp_path / "s", TorchDistSaveShardedStrategy(keep_only_main_replica=False))
    found = _convert(tmp_path / "s", tmp_path / "t", Format.ZARR)
    assert torch.equal(_values_in(found)["w"], WHOLE)


def test_the_tools_convert_merge_compare_and_show_any_format(source, tmp_path):
    def run(*arguments: Any) -> str:
        result = CliRunner().invoke(main, ["ckpt", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.output

    assert "5 tensors" in run("convert", source, tmp_path / "z", "--to", "zarr")
    told = run("convert", tmp_path / "z", tmp_path / "s", "--to", "safetensors")
    assert "left out, since safetensors has no place for them: 1 objects and the common data" in told
    assert "5 tensors" in run("merge", tmp_path / "z", tmp_path / "m")
    for other in (tmp_path / "z", tmp_path / "s", tmp_path / "s" / "model.safetensors", tmp_path / "m"):
        assert "the 5 tensors are equal" in run("diff", source, other)
    assert "a a a" in run("show", tmp_path / "s", "w")
    shown, drawn = (run("show", source, *more).count("__0_0.distcp[") for more in ((), ("--cut",)))
    assert drawn - shown == 2 + 3 + 4 + 1 + 1
    assert "files as they were written" in run("verify", tmp_path / "z")
    failed = CliRunner().invoke(main, ["ckpt", "merge", str(tmp_path / "nowhere"), str(tmp_path / "x")])
    assert failed.exit_code == 2 and "no such directory or file" in failed.output
