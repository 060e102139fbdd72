"""The fast writer's bytes are those of ``torch.save``, and data files know the checksum of every block."""

from __future__ import annotations

import io
import math
import os
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from remesh.checkpoint.checkpoint_errors import CheckpointFormatError
from remesh.checkpoint.formats import data_file
from remesh.checkpoint.formats.blob_frame import LARGEST_BYTES, frame_of
from remesh.checkpoint.formats.data_file import DataFile, write_tensor
from remesh.checkpoint.storage.integrity import BLOCK_BYTES, decode_trailer, read_trailer_bytes
from remesh.layout.dtypes import ITEMSIZE_BYTES
from remesh.layout.from_torch import torch_dtype


def some_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = torch_dtype(dtype)
    content = torch.frombuffer(bytearray(os.urandom(math.prod(shape) * kind.itemsize)), dtype=torch.uint8)
    return (content & 1 if kind == torch.bool else content).view(kind).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2,) * 9, (2,) * 10, (1,) * 27, (70, 300)], ids=str)
@pytest.mark.parametrize("dtype", [name for name in sorted(ITEMSIZE_BYTES) if not name.startswith("q")])
def test_a_framed_blob_equals_that_of_torch_to_the_byte(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = some_tensor(dtype, shape)
    file = io.BytesIO()
    torch.save(tensor, file)
    frame = frame_of(dtype, shape)
    assert frame is not None
    elements = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert frame.head + elements + frame.tail(zlib.crc32(elements)) == file.getvalue()
    assert frame.blob_bytes == len(file.getvalue())
    assert frame.stored_crc(frame.tail(7)) == 7


def test_empty_and_huge_tensors_are_left_to_torch() -> None:
    assert frame_of("float32", (3, 0)) is None
    assert frame_of("uint8", (LARGEST_BYTES + 1,)) is None
    assert frame_of("uint8", (LARGEST_BYTES,)) is not None
    assert frame_of("qint8", (3,)) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(100)[7:9],
        torch.zeros(0, 4),
        torch.ones(3).expand(2, 3),
        torch.view_as_complex(torch.ones(3, 2)).conj(),
        torch.ones(2, requires_grad=True),
    ],
)
def test_any_tensor_is_written_as_a_blob_that_torch_reads(tmp_path: Path, tensor: torch.Tensor) -> None:
    with DataFile(tmp_path / "f") as file:
        write_tensor(tensor, file)
        length = file.tell()
        file.finish()
    blob = (tmp_path / "f").read_bytes()[:length]
    loaded = torch.load(io.BytesIO(blob), weights_only=True)
    assert torch.equal(loaded, tensor.detach())
    assert loaded.is_contiguous()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2500)), max_size=12), st.randoms(use_true_random=False))
def test_blocks_and_elements_have_the_checksums_of_zlib(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[bool, int]], chance: object
) -> None:
    path = tmp_path_factory.mktemp("file") / "f"
    everything = b""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK_BYTES", 64), ("_FLUSH_BYTES", 512), ("_WRITE_BYTES", 1024)):
            patch.setattr(data_file, name, value)
        with DataFile(path) as file:
            for is_elements, length in writes:
                content = bytes((length * 7 + n * n) % 251 for n in range(length))
                if is_elements:
                    assert file.write_elements(memoryview(content)) == zlib.crc32(content)
                else:
                    file.write(content)
                everything += content
                assert file.tell() == len(everything)
            trailer = file.finish()
    assert path.read_bytes() == everything + trailer.encode()
    assert list(trailer.crcs) == [zlib.crc32(everything[at : at + 64]) for at in range(0, len(everything), 64)]
    assert decode_trailer(read_trailer_bytes(path)) == trailer


def test_large_elements_span_blocks(tmp_path: Path) -> None:
    content = os.urandom(2 * BLOCK_BYTES + (1 << 20) + 13)
    with DataFile(tmp_path / "f") as file:
        file.write(b"head")
        assert file.write_elements(memoryview(content)) == zlib.crc32(content)
        trailer = file.finish()
    assert (tmp_path / "f").read_bytes()[: trailer.data_bytes] == b"head" + content


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 1000, b"remeshCK" + b"\0" * 20, b"remeshCK" + b"\xff" * 16])
def test_a_file_without_a_trailer_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="checksums of data file"):
        read_trailer_bytes(tmp_path / "f")
