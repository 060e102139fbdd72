"""Checkpoints as an attacker would make them: each function spoils a good one, and says what it is after.

A pickle may call anything and may claim anything; a manifest may claim any size, place and shape. None of these files
needs to be well meant, only well formed enough to get far.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

MARK = "attack-has-run"
"""Name of the file that a call which should never be made would leave."""
Attack = Callable[[Path], None]


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _touch(checkpoint: Path) -> Call:
    return Call(os.system, f"touch {checkpoint.parent / MARK}")


def _change(checkpoint: Path, change: Callable[[Metadata], None]) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


def _write_pickle(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)


def _shared(depth: int) -> list[Any]:
    """Lists that share their parts: short as a pickle, 3 to the power of ``depth`` values when written out."""
    value: list[Any] = ["x"]
    for _ in range(depth):
        value = [value, value, value]
    return value


def _tensor(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: Any = torch.float32) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=dtype)
    zeros = torch.Size((0,) * len(chunk))
    return TensorStorageMetadata(properties, torch.Size(shape), [ChunkStorageMetadata(zeros, torch.Size(chunk))])


def call_beside_the_tensors(checkpoint: Path) -> None:
    _change(checkpoint, lambda metadata: setattr(metadata, "planner_data", _touch(checkpoint)))


def call_as_the_place_of_a_blob(checkpoint: Path) -> None:
    _change(checkpoint, lambda metadata: metadata.storage_data.update({MetadataIndex("x"): _touch(checkpoint)}))


def call_as_a_key(checkpoint: Path) -> None:
    content = b"\x80\x02}cos\nsystem\n(X\x04\x00\x00\x00trueltRK\x01s."
    _write_pickle(checkpoint, content)


def call_of_an_old_instance(checkpoint: Path) -> None:
    command = f"touch {checkpoint.parent / MARK}".encode()
    _write_pickle(checkpoint, b"(S'" + command + b"'\nios\nsystem\n.")


def call_of_an_object(checkpoint: Path) -> None:
    command = f"touch {checkpoint.parent / MARK}".encode()
    _write_pickle(checkpoint, b"(cos\nsystem\nS'" + command + b"'\no.")


def call_of_an_attribute_of_a_known_class(checkpoint: Path) -> None:
    module, name = b"torch.distributed.checkpoint.filesystem", b"_StorageInfo.__init_subclass__"
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text for text in (module, name))
    _write_pickle(checkpoint, b"\x80\x04" + texts + b"\x93)R.")


def call_by_way_of_the_builtins(checkpoint: Path) -> None:
    _change(checkpoint, lambda metadata: setattr(metadata, "storage_meta", Call(eval, "1 + 1")))


def state_applied_to_a_class(checkpoint: Path) -> None:
    _write_pickle(checkpoint, b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x07\x00\x00\x00versionK\x01stb.")


def extension_code(checkpoint: Path) -> None:
    _write_pickle(checkpoint, b"\x80\x02\x82\x01.")


def outside_reference(checkpoint: Path) -> None:
    _write_pickle(checkpoint, b"\x80\x02" + pickle.dumps(_shared(40), protocol=2)[2:-1] + b"Q.")


def call_in_the_common_data(checkpoint: Path) -> None:
    torch.save({"step": _touch(checkpoint)}, checkpoint / "common.pt")


def old_pickle_as_common_data(checkpoint: Path) -> None:
    (checkpoint / "common.pt").write_bytes(pickle.dumps({"step": _touch(checkpoint)}))


def call_in_a_blob(checkpoint: Path) -> None:
    buffer = io.BytesIO()
    torch.save([_touch(checkpoint)], buffer)
    name = "object.distcp"
    (checkpoint / name).write_bytes(buffer.getvalue())
    place = _StorageInfo(name, 0, len(buffer.getvalue()))
    _change(checkpoint, lambda metadata: metadata.storage_data.update({MetadataIndex("o/shard_0_1"): place}))


def script_in_the_place_of_a_blob(checkpoint: Path) -> None:
    """A TorchScript archive is a zip as well, and loading one may run code."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps(_touch(checkpoint)))
        archive.writestr("archive/data.pkl", pickle.dumps(_touch(checkpoint), protocol=2))
        archive.writestr("archive/version", "3\n")
    (checkpoint / "common.pt").write_bytes(buffer.getvalue())


def zip_that_unpacks_to_much(checkpoint: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
        archive.writestr("archive/version", "3\n")
    (checkpoint / "common.pt").write_bytes(buffer.getvalue())


def parts_that_share_parts(checkpoint: Path) -> None:
    """Written out in a message, this would be 3**60 values."""
    _change(checkpoint, lambda metadata: metadata.state_dict_metadata.update({"w": _shared(60)}))


def parts_that_share_parts_as_a_size(checkpoint: Path) -> None:
    _change(checkpoint, lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", tuple(_shared(60))))


def parts_that_share_parts_as_a_name(checkpoint: Path) -> None:
    def change(metadata: Metadata) -> None:
        index = MetadataIndex("w")
        object.__setattr__(index, "fqn", tuple(map(str, range(3))))
        metadata.storage_data[index] = _StorageInfo(tuple(_shared(60)), 0, 1)  # type: ignore[arg-type]

    _change(checkpoint, change)


def number_of_a_million_digits(checkpoint: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w"].chunks[0].offsets = (1 << 4_000_000, 0)

    _change(checkpoint, change)


def length_of_a_million_digits(checkpoint: Path) -> None:
    index = MetadataIndex("w", torch.Size((0, 0)))
    place = _StorageInfo("__0_0.distcp", 0, 1 << 4_000_000)
    _change(checkpoint, lambda metadata: metadata.storage_data.update({index: place}))


def deep_nest(checkpoint: Path) -> None:
    _write_pickle(checkpoint, b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".")


def frame_longer_than_the_file(checkpoint: Path) -> None:
    _write_pickle(checkpoint, b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.")


def bytes_longer_than_the_file(checkpoint: Path) -> None:
    _write_pickle(checkpoint, b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"N.")


def tensor_larger_than_any_memory(checkpoint: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w"] = _tensor((1 << 40, 1 << 20), (6, 2))

    _change(checkpoint, change)


def chunk_larger_than_its_bytes(checkpoint: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w"] = _tensor((1 << 40, 2), (1 << 40, 2))

    _change(checkpoint, change)


def blob_larger_than_its_file(checkpoint: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w"] = _tensor((1 << 40, 2), (1 << 40, 2))
        metadata.storage_data[MetadataIndex("w", torch.Size((0, 0)))] = _StorageInfo("__0_0.distcp", 0, 1 << 45)

    _change(checkpoint, change)


def dtype_that_is_a_function(checkpoint: Path) -> None:
    content = pickle.dumps(pickle.loads((checkpoint / ".metadata").read_bytes()), protocol=4)
    assert b"\x8c\x07float32\x94" in content
    _write_pickle(checkpoint, content.replace(b"\x8c\x07float32\x94", b"\x8c\x04load\x94"))


def dtype_that_is_a_text(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    content = pickle.dumps(metadata, protocol=4)
    whole = b"\x8c\x05torch\x94\x8c\x07float32\x94\x93"
    assert whole in content
    _write_pickle(checkpoint, content.replace(whole, b"\x8c\x05torch\x94\x8c\x04save\x94"))


def object_in_the_place_of_a_tensor(checkpoint: Path) -> None:
    _change(checkpoint, lambda metadata: metadata.state_dict_metadata.update({"w": BytesStorageMetadata()}))


def _with_file(name: str) -> Attack:
    def attack(checkpoint: Path) -> None:
        (checkpoint.parent / "secret").write_bytes((checkpoint / "__0_0.distcp").read_bytes())

        def change(metadata: Metadata) -> None:
            for index, place in metadata.storage_data.items():
                metadata.storage_data[index] = _StorageInfo(
                    name.format(outside=checkpoint.parent / "secret"), place.offset, place.length
                )

        _change(checkpoint, change)

    attack.__name__ = f"file_{name}"
    return attack


def link_to_a_file_outside(checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    data.rename(checkpoint.parent / "secret")
    data.symlink_to(checkpoint.parent / "secret")


def file_that_never_ends(checkpoint: Path) -> None:
    data = checkpoint / "__0_0.distcp"
    data.unlink()
    data.symlink_to("/dev/zero")


def marker_nested_deep(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text("[" * 100_000)


def marker_with_a_long_number(checkpoint: Path) -> None:
    version = "1" * 9999
    (checkpoint / "metadata.json").write_text(
        f'{{"sharded_backend": "torch_dist", "sharded_backend_version": {version}}}'
    )


def marker_with_a_nest_as_backend(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text(json.dumps({"sharded_backend": {"torch_dist": 1}}))


def sums_that_name_files_outside(checkpoint: Path) -> None:
    from_outside = b'{"version": 1, "files": {"../secret": ["whole", 1, 1]}}\n'
    (checkpoint / ".remesh-checksums").write_bytes(from_outside + b"%08x\n" % zlib.crc32(from_outside))


ATTACKS: tuple[Attack, ...] = (
    *(call_beside_the_tensors, call_as_the_place_of_a_blob, call_as_a_key, call_of_an_old_instance, call_of_an_object),
    *(call_of_an_attribute_of_a_known_class, call_by_way_of_the_builtins, state_applied_to_a_class, extension_code),
    *(outside_reference, call_in_the_common_data, old_pickle_as_common_data, call_in_a_blob),
    *(
        script_in_the_place_of_a_blob,
        zip_that_unpacks_to_much,
        parts_that_share_parts,
        parts_that_share_parts_as_a_size,
    ),
    *(parts_that_share_parts_as_a_name, number_of_a_million_digits, length_of_a_million_digits, deep_nest),
    *(frame_longer_than_the_file, bytes_longer_than_the_file, tensor_larger_than_any_memory),
    *(chunk_larger_than_its_bytes, blob_larger_than_its_file, dtype_that_is_a_function, dtype_that_is_a_text),
    *(object_in_the_place_of_a_tensor, link_to_a_file_outside, file_that_never_ends, marker_nested_deep),
    *(marker_with_a_long_number, marker_with_a_nest_as_backend, sums_that_name_files_outside),
    *map(_with_file, ("../secret", "{outside}", "a/../../secret", "..\\secret", "secret\0", "", ".", "/dev/zero")),
)
"""Everything that is tried."""
