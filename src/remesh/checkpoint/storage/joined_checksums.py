"""Combination of CRC-32 checksums: that of a whole from those of its blocks.

CRC-32 is linear over GF(2): appending zeros to what has a checksum is a fixed matrix for each number of zeros, and the
checksum of A then B is that of A after as many zeros as B is long, xor that of B. The matrix of a power of two is
squared out of one bit, and kept as four tables, one for each byte of a checksum.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0xEDB88320
Checksums = npt.NDArray[np.uint32]


def join_blocks(crc: int, crcs: Checksums, block_bytes: int) -> int:
    """What a CRC-32 becomes when blocks with these follow, all of this length, which is a power of two.

    >>> from remesh.foundation.checksums import crc32
    >>> content = bytes(range(16))
    >>> blocks = np.array([crc32(content[8:12]), crc32(content[12:])], np.uint32)
    >>> join_blocks(crc32(content[:8]), blocks, 4) == crc32(content)
    True
    """
    count = 1 << len(crcs).bit_length()  # nothing has the checksum 0, so nothings may stand at the beginning
    padded = np.zeros(count, np.uint32)
    padded[count - len(crcs) :] = crcs
    padded[count - len(crcs) - 1] = crc
    return int(join_groups(padded, count, block_bytes)[0])


def join_groups(crcs: Checksums, group: int, block_bytes: int) -> Checksums:
    """The CRC-32 of each group of so many blocks, a power of two like their length; an incomplete group has none."""
    joined = crcs[: len(crcs) // group * group].reshape(-1, group)
    while joined.shape[1] > 1:
        left, right = joined[:, ::2], joined[:, 1::2]
        a, b, c, d = _tables(block_bytes)
        joined = a[left & 255] ^ b[left >> 8 & 255] ^ c[left >> 16 & 255] ^ d[left >> 24] ^ right
        block_bytes *= 2
    return joined[:, 0]


@lru_cache(maxsize=64)
def _tables(num_bytes: int) -> tuple[Checksums, ...]:
    """The matrix of appending so many zero bytes, applied to each value of each of the four bytes."""
    return tuple(np.array(_span(_columns(num_bytes)[first : first + 8]), np.uint32) for first in (0, 8, 16, 24))


@lru_cache(maxsize=64)
def _columns(num_bytes: int) -> list[int]:
    assert num_bytes & (num_bytes - 1) == 0, "a matrix is squared until it stands for a power of two"
    if num_bytes == 1:
        columns = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # one zero bit appended
        for _ in range(3):
            columns = [_apply(columns, column) for column in columns]
        return columns
    half = _columns(num_bytes // 2)
    return [_apply(half, column) for column in half]


def _span(columns: list[int]) -> list[int]:
    """Every sum of some columns, by the bits of its number."""
    sums = [0]
    for column in columns:
        sums += [one ^ column for one in sums]
    return sums


def _apply(columns: list[int], vector: int) -> int:
    result, bit = 0, 0
    while vector:
        if vector & 1:
            result ^= columns[bit]
        vector >>= 1
        bit += 1
    return result
