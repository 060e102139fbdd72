"""Checksums of blocks put together are those of zlib over all of them."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import remesh
from remesh.checkpoint.storage import checked_file
from remesh.checkpoint.storage.integrity import BLOCK_BYTES
from remesh.checkpoint.storage.joined_checksums import join_blocks, join_groups
from remesh.foundation.checksums import crc32


@given(st.binary(max_size=50), st.binary(max_size=400), st.sampled_from([1, 2, 8, 32]))
def test_blocks_are_joined_to_what_stands_before_them(before: bytes, content: bytes, block: int) -> None:
    whole = content[: len(content) // block * block]
    crcs = np.array([zlib.crc32(whole[at : at + block]) for at in range(0, len(whole), block)], np.uint32)
    assert join_blocks(zlib.crc32(before), crcs, block) == zlib.crc32(before + whole)


@given(st.binary(max_size=400), st.sampled_from([1, 4, 16]), st.sampled_from([1, 2, 8]))
def test_groups_have_the_checksums_of_their_bytes(content: bytes, block: int, group: int) -> None:
    crcs = np.array([zlib.crc32(content[at : at + block]) for at in range(0, len(content), block)], np.uint32)
    size = block * group
    complete = [content[at : at + size] for at in range(0, len(crcs) // group * size, size)]
    if complete and len(complete[-1]) < size:  # the last block was a short one
        complete.pop()
    found = join_groups(crcs, group, block)[: len(complete)]
    assert found.tolist() == [zlib.crc32(one) for one in complete]


@pytest.mark.parametrize("num_before", [0, 1, 7, 1000])
def test_blocks_of_a_large_tensor_are_checked_in_groups_wherever_it_begins(
    num_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = 4 << 20
    state = {"a": torch.zeros(num_before * 1024), "b": torch.arange(num_bytes // 4, dtype=torch.int32)}
    remesh.save(state, tmp_path / "c")
    wanted = {"b": torch.zeros(num_bytes // 4, dtype=torch.int32)}
    looked_at: list[int] = []
    monkeypatch.setattr(checked_file, "crc32", lambda part: looked_at.append(len(part)) or crc32(part))
    remesh.load(wanted, tmp_path / "c")
    assert wanted["b"].equal(state["b"]) and sum(looked_at) >= num_bytes
    groups = num_bytes // (checked_file._GROUP * BLOCK_BYTES)
    assert len(looked_at) <= groups + 4 * checked_file._GROUP
