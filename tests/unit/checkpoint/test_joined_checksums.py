"""Checksums of blocks put together are those of zlib over all of them."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remesh.checkpoint.storage.joined_checksums import join_blocks, join_groups


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
