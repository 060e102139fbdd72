"""Whatever happens to the files of a checkpoint, a load tells it, naming the place, or gives what was saved.

Each case spoils one thing of a good checkpoint in one way, loads whole tensors, rows, columns and casts, and mends it.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import remesh
from remesh import dist_checkpointing
from remesh.checkpoint.run.conversion import Format, convert, gather_contents, open_any
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.core import CheckpointingException
from tests.profiles import so_many

_SHAPE = (120, 250)
FORMATS = ("torch_dist", "zarr", "files of 40 kB")


def _values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(_SHAPE, generator=generator),
        "half": torch.randn(1000, generator=generator).to(torch.bfloat16),
        "n": torch.randint(0, 9, (7,), generator=generator),
    }


def _save(directory: Path, form: str, seed: int) -> None:
    values = _values(seed)
    halves = enumerate(values["w"].chunk(2, 0))
    state = {
        "w": {at: ShardedTensor.from_rank_offsets("w", half.contiguous(), (0, at, 2)) for at, half in halves},
        "rest": [ShardedTensor.from_rank_offsets(key, values[key]) for key in ("half", "n")],
        "o": ShardedObject("rng/state", {"seed": seed, "words": list(range(30))}, (1,), (0,)),
        "step": seed,
        "settings": {"names": ["a", "b"], "lr": 0.5},
    }
    directory.mkdir()
    if form == "zarr":
        dist_checkpointing.save(state, directory, ("zarr", 1))
        return
    dist_checkpointing.save(state, directory)
    if form != "torch_dist":
        contents = gather_contents([open_any(directory)])
        convert(contents, directory.with_name(f"{directory.name}-many"), Format.TORCH_DIST, max_file_bytes=40_000)
        shutil.rmtree(directory)
        directory.with_name(f"{directory.name}-many").rename(directory)


def _whole(directory: Path) -> bool:
    wanted = {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(_SHAPE)),
        "rest": [
            ShardedTensor.from_rank_offsets("half", torch.zeros(1000, dtype=torch.bfloat16)),
            ShardedTensor.from_rank_offsets("n", torch.zeros(7, dtype=torch.int64)),
        ],
        "o": ShardedObject("rng/state", None, (1,), (0,)),
    }
    loaded = dist_checkpointing.load(wanted, directory)
    values = _values(1)
    same = [torch.equal(loaded["w"], values["w"]), *map(torch.equal, loaded["rest"], (values["half"], values["n"]))]
    same += [loaded["o"] == {"seed": 1, "words": list(range(30))}, loaded["step"] == 1]
    return all(same) and loaded["settings"] == {"names": ["a", "b"], "lr": 0.5}


def _part(directory: Path, start: tuple[int, int], shape: tuple[int, int], dtype: torch.dtype) -> bool:
    part = ShardedTensor("w", torch.zeros(shape, dtype=dtype), dtype, shape, _SHAPE, start, None)
    loaded = dist_checkpointing.load({"w": part}, directory, validate_access_integrity=False)
    expected = _values(1)["w"][start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
    return torch.equal(loaded["w"], expected.to(dtype)) and loaded["step"] == 1


LOADS: tuple[Callable[[Path], bool], ...] = (
    _whole,
    lambda directory: _part(directory, (50, 0), (20, 250), torch.float32),
    lambda directory: _part(directory, (0, 100), (120, 9), torch.float32),
    lambda directory: _part(directory, (3, 3), (90, 200), torch.float64),
)


@dataclass(frozen=True)
class Damage:
    """One thing that is done to one file."""

    what: str
    path: Path
    content: bytes | None
    """What the file holds afterwards; None for a file that is gone."""


def _flips(files: dict[Path, bytes], chance: random.Random, count: int) -> Iterator[Damage]:
    for _ in range(count):
        path = chance.choice(sorted(files))
        content = bytearray(files[path])
        at, bits = chance.randrange(len(content)), chance.randrange(1, 256)
        content[at] ^= bits
        yield Damage(f"byte {at} of {len(content)} xor {bits}", path, bytes(content))


def _other_damage(files: dict[Path, bytes], others: dict[Path, bytes], chance: random.Random) -> Iterator[Damage]:
    """Every file cut, lengthened, emptied, missing, and in exchange for each file of alike name."""
    for path, content in files.items():
        for stop in {0, 1, len(content) // 2, len(content) - 1, chance.randrange(len(content))}:
            yield Damage(f"cut to {stop} of {len(content)}", path, content[:stop])
        yield Damage("longer by a byte", path, content + b"\0")
        yield Damage("all zeros", path, bytes(len(content)))
        yield Damage("missing", path, None)
        for other, theirs in {**files, **others}.items():
            if theirs != content and other.suffix == path.suffix:
                yield Damage(f"that of {other}", path, theirs)


def _files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.stat().st_size}


def _check(directory: Path, damage: Damage, good: bytes) -> str:
    """What came of it; fails for a wrong value, and for an error that is not ours or does not name the checkpoint."""
    if damage.content is None:
        damage.path.unlink()
    else:
        damage.path.write_bytes(damage.content)
    outcomes = set()
    try:
        for load in LOADS:
            try:
                assert load(directory), f"wrong value: {damage.path} {damage.what}"
                outcomes.add("harmless")
            except CheckpointingException as raised:
                assert str(directory) in str(raised), f"{damage.path} {damage.what}: {raised}"
                outcomes.add("told")
    finally:
        damage.path.write_bytes(good)
    return "told" if "told" in outcomes else "harmless"


@pytest.fixture(scope="module", params=FORMATS)
def spoilt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint to be spoilt, and another of the same form with other values."""
    root = tmp_path_factory.mktemp("corruption")
    _save(root / "good", request.param, 1)
    _save(root / "other", request.param, 2)
    assert all(load(root / "good") for load in LOADS)
    return root / "good", root / "other"


@pytest.mark.parametrize("num_flips", [70, pytest.param(1000, marks=pytest.mark.long)])
def test_any_byte_that_changes_is_told_or_harmless(spoilt, num_flips):
    good, _ = spoilt
    files = _files(good)
    outcomes = Counter(_check(good, one, files[one.path]) for one in _flips(files, random.Random(num_flips), num_flips))
    print(f"{num_flips} flips in {len(files)} files: {dict(outcomes)}")
    assert outcomes["told"] > 0.8 * num_flips
    assert all(load(good) for load in LOADS)


def test_files_that_are_cut_longer_missing_or_exchanged_are_told_or_harmless(spoilt):
    good, other = spoilt
    files = _files(good)
    damages = list(_other_damage(files, _files(other), random.Random(1)))[:: so_many(1, quick=3)]
    outcomes = {(one.path.name, one.what): _check(good, one, files[one.path]) for one in damages}
    harmless = {what for what, outcome in outcomes.items() if outcome == "harmless"}
    # Without sums a checkpoint is one that nobody has summed up; all else is told.
    assert harmless <= {(".remesh-checksums", "missing")}
    assert all(load(good) for load in LOADS)


@pytest.mark.parametrize("num_flips", [40, pytest.param(400, marks=pytest.mark.long)])
def test_whole_tensors_of_a_writer_without_our_sums_are_checked_too(tmp_path, num_flips):
    """Native torch keeps no sums beside those of zip, which cover the elements of each blob."""
    values = _values(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(values), checkpoint_id=tmp_path / "n", no_dist=True)
    path = tmp_path / "n" / "__0_0.distcp"
    good = path.read_bytes()
    chance = random.Random(num_flips)
    num_told = 0
    for _ in range(num_flips):
        at = chance.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << chance.randrange(8)]) + good[at + 1 :])
        try:
            loaded = remesh.load({key: torch.zeros_like(value) for key, value in values.items()}, tmp_path / "n")
            assert all(torch.equal(loaded[key], value) for key, value in values.items()), f"wrong value: byte {at}"
        except CheckpointingException:
            num_told += 1
    assert num_told > 0.9 * num_flips
