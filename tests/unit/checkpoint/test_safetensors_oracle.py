"""Files of Hugging Face against its own library, both ways: random tensors in random files, whole and hurt."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointingException
from remesh.checkpoint.formats.safetensors_format import INDEX_FNAME
from remesh.checkpoint.run.reader import open_checkpoint
from remesh.checkpoint.run.safetensors import export, open_safetensors
from remesh.checkpoint.run.stored_values import read_box

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)
State = dict[str, torch.Tensor]


def _tensors(chance: random.Random) -> State:
    """Scalars and empty tensors are among them, and one that is there twice."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    state: State = {}
    for number in range(chance.randint(2, 9)):
        shape = tuple(chance.choice([0, 1, 2, 3, 5, 7]) for _ in range(chance.randint(0, 3)))
        values = torch.randint(0, 100, shape, generator=generator)
        state[f"layers.{number}.weight"] = values.to(chance.choice(_DTYPES))
    state["head.weight"] = state["layers.0.weight"].clone()
    return state


def _write(state: State, folder: Path, chance: random.Random) -> list[Path]:
    """As ``save_pretrained`` leaves them: files that count themselves, and an index."""
    folder.mkdir()
    names = list(state)
    chance.shuffle(names)
    total = chance.randint(2, 4)
    files = {f"model-{at:05d}-of-{total:05d}.safetensors": names[at - 1 :: total] for at in range(1, total + 1)}
    for file, keys in files.items():
        save_file({key: state[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in files.items() for key in keys}
    (folder / INDEX_FNAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / file for file, keys in files.items() if keys]


def _read(folder: Path) -> State:
    found = open_safetensors(folder)
    return {key: read_box(found, key) for key in found.manifest.tensors}


def _check(found: State, state: State) -> None:
    assert found.keys() == state.keys()
    assert all(found[key].dtype == one.dtype and found[key].equal(one) for key, one in state.items())


@pytest.mark.parametrize("seed", range(30))
def test_what_the_library_writes_is_read_and_what_is_written_it_reads(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    state = _tensors(chance)
    _write(state, tmp_path / "theirs", chance)
    _check(_read(tmp_path / "theirs"), state)
    remesh.save(state, tmp_path / "ours")
    size = max(one.nbytes for one in state.values())
    files = export(
        open_checkpoint(tmp_path / "ours"), tmp_path / "back", max_file_bytes=chance.randint(1, 3 * size + 1)
    )
    loaded: State = {}
    for file in files:
        loaded |= load_file(tmp_path / "back" / file)
    assert sum(map(len, files.values())) == len(state)
    _check(loaded, state)
    _check(_read(tmp_path / "back"), state)


def _lose_a_file(files: list[Path], chance: random.Random) -> None:
    chance.choice(files).unlink()


def _lose_the_index_and_a_file(files: list[Path], chance: random.Random) -> None:
    files[0].with_name(INDEX_FNAME).unlink()
    _lose_a_file(files, chance)


def _shorten_a_file(files: list[Path], chance: random.Random) -> None:
    path = chance.choice(files)
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def _shorten_the_index(files: list[Path], chance: random.Random) -> None:
    path = files[0].with_name(INDEX_FNAME)
    path.write_text(path.read_text()[: chance.randrange(math.ceil(path.stat().st_size))])


def _name_a_file_that_is_not_there(files: list[Path], chance: random.Random) -> None:
    _change_index(files, chance, "model-00009-of-00009.safetensors")


def _name_another_file(files: list[Path], chance: random.Random) -> None:
    path = files[0].with_name(INDEX_FNAME)
    weight_map = json.loads(path.read_text())["weight_map"]
    key = chance.choice(list(weight_map))
    other = next(file.name for file in files if file.name != weight_map[key])
    path.write_text(json.dumps({"weight_map": weight_map | {key: other}}))


def _change_index(files: list[Path], chance: random.Random, file: str) -> None:
    path = files[0].with_name(INDEX_FNAME)
    weight_map = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": weight_map | {chance.choice(list(weight_map)): file}}))


def _leave_an_older_file(files: list[Path], chance: random.Random) -> None:
    """As when a model is saved again into one file, or was before."""
    save_file({"head.weight": torch.ones(3)}, files[0].with_name("model.safetensors"))
    if chance.random() < 0.5:
        files[0].with_name(INDEX_FNAME).unlink()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "hurt",
    [
        _lose_a_file,
        _lose_the_index_and_a_file,
        _shorten_a_file,
        _shorten_the_index,
        _name_a_file_that_is_not_there,
        _name_another_file,
        _leave_an_older_file,
    ],
)
def test_what_is_missing_hurt_or_there_twice_is_refused(
    tmp_path: Path, hurt: Callable[[list[Path], random.Random], None], seed: int
) -> None:
    chance = random.Random(seed)
    files = _write(_tensors(chance), tmp_path / "c", chance)
    hurt(files, chance)
    with pytest.raises(CheckpointingException, match=str(tmp_path)):
        _read(tmp_path / "c")
