"""Checkpoints become parts of Megatron's old kind: what comes out is what Megatron would have saved on that mesh.

Megatron itself goes on from them in ``tests/interop/test_megatron_training.py``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.foreign.megatron_legacy import read_megatron_legacy, save_megatron
from remesh.checkpoint.foreign.megatron_parts import LegacyMesh, write_megatron_legacy
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.cli import main
from remesh.foundation.errors import ConfigError
from tests.profiles import seeds
from tests.unit.checkpoint.foreign.megatron_model import FILE, Model, random_stages, write_parts


def _even(num_layers: int, mesh: LegacyMesh) -> list[list[list[int]]]:
    """Numbers of the layers of each chunk of each stage, the same number in each."""
    size = num_layers // (mesh.pipeline * mesh.virtual)
    return [
        [
            list(range(start * size, (start + 1) * size))
            for start in range(stage, mesh.pipeline * mesh.virtual, mesh.pipeline)
        ]
        for stage in range(mesh.pipeline)
    ]


def _differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two parts differ; names of what is no tensor are Megatron's own affair, if there is nothing in them."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = {key for key in {*found, *expected} if not str(key).endswith("_extra_state")}
        return [line for key in keys for line in _differences(found.get(key), expected.get(key), f"{path}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return [
            line
            for at, one in enumerate(zip(found, expected, strict=True))
            for line in _differences(*one, f"{path}/{at}")
        ]
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        is_same = found.dtype == expected.dtype and found.equal(expected)
    else:
        is_same = bool(found == expected)
    return [] if is_same else [f"{path}: {found} instead of {expected}"]


def _meshes(num_layers: int) -> list[LegacyMesh]:
    shapes = [(1, 1), (2, 1), (3, 1), (2, 2), (1, 2)]
    return [
        LegacyMesh(tensor, *shape)
        for tensor in (1, 2, 4)
        for shape in shapes
        if num_layers % (shape[0] * shape[1]) == 0
    ]


@pytest.mark.parametrize("seed", seeds(12, quick=4))
def test_parts_are_those_of_megatron_on_that_mesh(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stages, num_layers = random_stages(chance)
    model = Model(seed, num_layers, gated=chance.random() < 0.5, tied=chance.random() < 0.5)
    half = chance.random() < 0.5
    write_parts(model, tmp_path / "old", chance.choice([1, 2, 4]), stages, half=half)
    save_megatron(read_megatron_legacy(tmp_path / "old"), tmp_path / "ours")
    mesh = chance.choice(_meshes(num_layers))
    place = write_megatron_legacy(open_checkpoint(tmp_path / "ours"), tmp_path / "new", mesh)
    assert place.name == "iter_0000007" and (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "7"
    write_parts(model, tmp_path / "expected", mesh.tensor, _even(num_layers, mesh), half=half)
    names = sorted(path.parent.name for path in (tmp_path / "expected").rglob(FILE))
    assert sorted(path.name for path in place.iterdir()) == names
    for name in names:
        found = torch.load(place / name / FILE, weights_only=False)
        expected = torch.load(tmp_path / "expected" / name / FILE, weights_only=False)
        args = found.pop("args")
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (mesh.tensor, mesh.pipeline)
        del expected["args"], expected["rng_state"]
        assert not _differences(found, expected), name


def _save(folder: Path, change: Any = None, num_layers: int = 2) -> Path:
    model = Model(1, num_layers, gated=True, tied=False)
    write_parts(model, folder / "old", 1, [[list(range(num_layers))]])
    state = read_megatron_legacy(folder / "old")
    if change is not None:
        change(state)
    save_megatron(state, folder / "ours")
    return folder / "ours"


def test_the_verb_takes_the_mesh_that_is_given_or_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verb = ["ckpt", "convert", str(_save(tmp_path))]
    main([*verb, str(tmp_path / "as-saved"), "--to", "megatron-legacy"], standalone_mode=False)
    sizes = ["--tensor-parallel", "2", "--pipeline-parallel", "2"]
    main([*verb, str(tmp_path / "cut"), "--to", "megatron-legacy", *sizes], standalone_mode=False)
    assert [len([*(tmp_path / name).rglob(FILE)]) for name in ("as-saved", "cut")] == [1, 4]
    assert "--no-load-rng" in capsys.readouterr().out
    with pytest.raises(click.UsageError, match="are of --to megatron-legacy, found --to dcp"):
        main([*verb, str(tmp_path / "x"), "--to", "dcp", *sizes], standalone_mode=False)


def _add_unknown(state: dict[str, Any]) -> None:
    state["decoder.layers.mlp.router.weight"] = torch.ones(2, 3)
    state |= {
        f"optimizer.state.{kind}.decoder.layers.mlp.router.weight": torch.ones(2, 3)
        for kind in ("exp_avg", "exp_avg_sq")
    }


def _forget_state(state: dict[str, Any]) -> None:
    del state["optimizer.state.exp_avg.output_layer.weight"]


def _distribute(state: dict[str, Any]) -> None:
    state["optimizer"]["param_state_sharding_type"] = "fully_reshardable"


def _deal_unevenly(state: dict[str, Any]) -> None:
    state["args"].decoder_first_pipeline_num_layers = 1


def _regroup(state: dict[str, Any]) -> None:
    state["optimizer"]["param_groups"].pop()


@pytest.mark.parametrize(
    ("change", "mesh", "told"),
    [
        (_add_unknown, LegacyMesh(1, 1), r"1 tensors are cut(.|\n)*decoder.layers.mlp.router.weight"),
        (_forget_state, LegacyMesh(1, 1), r"states that not every parameter has(.|\n)*exp_avg.output_layer.weight"),
        (_distribute, LegacyMesh(1, 1), "param_state_sharding_type.*expected one that is not distributed"),
        (_deal_unevenly, LegacyMesh(1, 1), "dealt out unevenly .decoder_first_pipeline_num_layers"),
        (_regroup, LegacyMesh(1, 1), "groups of a program's own are not known"),
        (None, LegacyMesh(3, 1), r"does not divide by 3 ranks; give another --tensor-parallel"),
        (None, LegacyMesh(1, 3), r"2 layers on 3 ranks.*give another --pipeline-parallel"),
    ],
)
def test_what_the_parts_have_no_place_for_is_refused_by_name(
    tmp_path: Path, change: Any, mesh: LegacyMesh, told: str
) -> None:
    source = open_checkpoint(_save(tmp_path, change))
    with pytest.raises((CheckpointingException, ConfigError), match=told):
        write_megatron_legacy(source, tmp_path / "new", mesh)
    assert not (tmp_path / "new" / "iter_0000007").exists()


def test_a_checkpoint_of_another_program_and_an_iteration_that_is_there_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(_save(tmp_path))
    write_megatron_legacy(source, tmp_path / "new", LegacyMesh(1, 1))
    with pytest.raises(CheckpointingException, match="is there; give a new folder"):
        write_megatron_legacy(source, tmp_path / "new", LegacyMesh(1, 1))
    remesh.save({"model": {"a": torch.ones(2)}}, tmp_path / "plain")
    with pytest.raises(CheckpointingException, match="expected a checkpoint of Megatron's torch_dist"):
        write_megatron_legacy(open_checkpoint(tmp_path / "plain"), tmp_path / "new", LegacyMesh(1, 1))
