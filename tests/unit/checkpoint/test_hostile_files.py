"""A checkpoint from a stranger: whatever its files say, nothing runs, nothing outside is read, the error is clear."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties

from remesh import dist_checkpointing
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointingException
from remesh.checkpoint.formats.data_file import load_object
from remesh.checkpoint.formats.inert_pickle import load_inert
from remesh.checkpoint.run.housekeeping import latest_complete
from remesh.checkpoint.storage.integrity import CHECKSUMS_FNAME
from remesh.dist_checkpointing import ShardedObject, ShardedTensor

TRIGGERED: list[str] = []


def trigger(*values: object) -> None:
    TRIGGERED.append(repr(values))


class Attack:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def wanted() -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(6, 2)),
        "o": ShardedObject("o", None, (1,), (0,)),
    }


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A good checkpoint with its checksums, to be spoilt."""
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    full = ShardedTensor.from_rank_offsets("w", torch.arange(12.0).reshape(6, 2))
    dist_checkpointing.save({"w": full, "o": ShardedObject("o", {"a": [1]}, (1,), (0,)), "step": 1}, directory)
    return directory


@pytest.fixture
def checkpoint(sealed: Path) -> Path:
    """The same without checksums: a stranger has none, or makes them fit."""
    (sealed / CHECKSUMS_FNAME).unlink()
    return sealed


def rewrite(checkpoint: Path, change: Callable[[Metadata], None]) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def reason_of_loading(checkpoint: Path) -> str:
    with pytest.raises(CheckpointFormatError) as caught:
        dist_checkpointing.load(wanted(), checkpoint)
    assert str(checkpoint) in str(caught.value), "the message names the checkpoint"
    assert latest_complete(checkpoint.parent) is None or caught.value.reason in {
        "wrong-blob",
        "bad-blob",
        "forbidden-global",
    }
    assert not TRIGGERED
    return caught.value.reason


@pytest.mark.parametrize(
    "attack",
    [
        Attack(os.system, "true"),
        Attack(trigger, 1),
        Attack(eval, "1"),
        Attack(getattr, Metadata, "version"),
        Attack(torch.load, "x"),
        Attack(shutil.rmtree, "x"),
        Attack(pickle.loads, b"N."),
        Attack(setattr, Metadata, "x", 1),
    ],
    ids=lambda attack: attack.call[0].__name__,
)
def test_a_call_in_the_metadata_is_refused_and_not_made(checkpoint: Path, attack: Attack) -> None:
    rewrite(checkpoint, lambda metadata: setattr(metadata, "planner_data", attack))
    assert reason_of_loading(checkpoint) == "forbidden-global"


@pytest.mark.parametrize("name", [b"torch.distributed.checkpoint.metadata\nMetadata", b"torch\nSize", b"torch\nint8"])
def test_a_pickle_cannot_change_the_classes_it_names(tmp_path: Path, name: bytes) -> None:
    # GLOBAL, then BUILD with (None, {"version": "owned"}): state applied to the named class itself.
    hostile = b"c" + name + b"\n(N}X\x07\x00\x00\x00versionX\x05\x00\x00\x00ownedstb."
    with contextlib.suppress(CheckpointFormatError):
        load_inert(hostile, tmp_path)
    assert getattr(load_inert(b"c" + name + b"\n.", tmp_path), "version", None) is None
    assert Metadata.version is None
    assert not hasattr(torch.Size, "version")


def test_a_call_in_the_common_data_is_refused(checkpoint: Path) -> None:
    file = io.BytesIO()
    torch.save({"step": Attack(trigger, 2)}, file)
    (checkpoint / "common.pt").write_bytes(file.getvalue())
    assert reason_of_loading(checkpoint) == "forbidden-global"


def test_a_call_in_a_tensor_file_is_refused(checkpoint: Path) -> None:
    file = io.BytesIO()
    torch.save(Attack(trigger, 3), file)
    name = "__0_0.distcp"
    (checkpoint / name).write_bytes(file.getvalue())

    def point_all_there(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(file.getvalue())

    rewrite(checkpoint, point_all_there)
    assert reason_of_loading(checkpoint) == "forbidden-global"


@pytest.mark.parametrize(
    "name", ["../secret.distcp", "{outside}/secret.distcp", "a/../../secret", "..", "", "a\\..\\b", "a\0b"]
)
def test_no_path_leaves_the_directory(checkpoint: Path, name: str) -> None:
    (checkpoint.parent / "secret.distcp").write_bytes((checkpoint / "__0_0.distcp").read_bytes())
    target = name.format(outside=checkpoint.parent)
    rewrite(checkpoint, lambda m: [setattr(info, "relative_path", target) for info in m.storage_data.values()])  # type: ignore[arg-type, return-value]
    assert reason_of_loading(checkpoint) == "escaping-path"


def test_no_link_leaves_the_directory(checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    (checkpoint.parent / "secret").write_bytes(data.read_bytes())
    data.unlink()
    data.symlink_to(checkpoint.parent / "secret")
    assert reason_of_loading(checkpoint) == "escaping-path"


@pytest.mark.parametrize("lost_bytes", [1, 500, 10**9])
def test_a_truncated_data_file_is_found_before_anything_is_filled(sealed: Path, lost_bytes: int) -> None:
    data = sealed / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: max(0, data.stat().st_size - lost_bytes)])
    assert reason_of_loading(sealed) == "truncated"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("metadata.json", "not-a-checkpoint"),
        (".metadata", "missing-metadata"),
        ("common.pt", "missing-common"),
        ("__0_0.distcp", "missing-file"),
    ],
)
def test_a_missing_file_is_told_by_name(checkpoint: Path, name: str, reason: str) -> None:
    (checkpoint / name).unlink()
    assert reason_of_loading(checkpoint) == reason


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "common.pt"])
@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"[]", b"garbage {", b"\x80\x04\x95"])
def test_garbage_in_a_small_file_is_told(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    assert reason_of_loading(checkpoint) in {"bad-config", "bad-pickle", "bad-metadata", "bad-blob", "forbidden-global"}


def test_any_cut_or_flip_of_the_metadata_is_an_error_or_harmless(checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    good = path.read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        spoilt = bytearray(good[: chance.randrange(len(good))] if chance.random() < 0.3 else good)
        for _ in range(chance.randrange(3)):
            if spoilt:
                spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        path.write_bytes(spoilt)
        with contextlib.suppress(CheckpointingException):
            dist_checkpointing.load(wanted(), checkpoint)
    assert not TRIGGERED


def test_any_flip_in_a_data_file_is_an_error_or_changes_values_only(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    good = path.read_bytes()
    chance = random.Random(0)
    for _ in range(150):
        spoilt = bytearray(good)
        spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        path.write_bytes(spoilt)
        try:
            loaded = dist_checkpointing.load(wanted(), checkpoint)
        except CheckpointingException:
            continue
        assert loaded["w"].shape == (6, 2)  # type: ignore[call-overload]


def spoil_chunk(metadata: Metadata, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(metadata.state_dict_metadata["w"].chunks[0], name, value)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: spoil_chunk(m, sizes=torch.Size([7, 2])),
        lambda m: spoil_chunk(m, offsets=torch.Size([-1, 0])),
        lambda m: spoil_chunk(m, offsets=torch.Size([0])),
        lambda m: spoil_chunk(m, sizes="many"),
        lambda m: setattr(m.state_dict_metadata["w"], "size", (2**70, "x")),
        lambda m: setattr(m.state_dict_metadata["w"], "chunks", {}),
        lambda m: setattr(m.state_dict_metadata["w"], "properties", None),
        lambda m: m.state_dict_metadata.__setitem__(3, None),
        lambda m: setattr(m, "state_dict_metadata", []),
        lambda m: setattr(m, "storage_data", None),
        lambda m: m.storage_data.clear(),
        lambda m: m.storage_data.__setitem__(
            MetadataIndex("w", (0, 0)), ChunkStorageMetadata(torch.Size(), torch.Size())
        ),
        lambda m: setattr(next(iter(m.storage_data.values())), "offset", -5),
        lambda m: setattr(next(iter(m.storage_data.values())), "length", 1.5),
        lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", 7),
    ],
)
def test_metadata_of_the_right_classes_with_wrong_values_is_told(
    checkpoint: Path, change: Callable[[Metadata], None]
) -> None:
    rewrite(checkpoint, change)
    assert reason_of_loading(checkpoint) == "bad-metadata"


def test_a_blob_that_is_not_what_the_metadata_says_is_told(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda m: setattr(m.state_dict_metadata["w"], "properties", TensorProperties(torch.int32)))
    assert reason_of_loading(checkpoint) == "wrong-blob"


def test_compressed_blobs_are_refused_by_name(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda m: [setattr(i, "transform_descriptors", ["zstd"]) for i in m.storage_data.values()])  # type: ignore[arg-type, return-value]
    assert reason_of_loading(checkpoint) == "unknown-transform"


def test_an_unknown_backend_is_refused_by_name(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "tensors", "sharded_backend_version": 1}')
    assert reason_of_loading(checkpoint) == "unknown-backend"


class Enumeration(enum.Enum):
    """A class that is not known to be safe."""

    ONE = 1


def test_a_class_that_is_not_known_is_told_by_its_name() -> None:
    blob = io.BytesIO()
    torch.save({"kind": Enumeration.ONE}, blob)
    with pytest.raises(CheckpointFormatError, match=r"Unsupported global: GLOBAL \S*Enumeration"):
        load_object(blob.getvalue(), "a blob")
