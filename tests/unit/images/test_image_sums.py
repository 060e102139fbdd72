"""Checksums and compressed pages have one form, whichever library makes them."""

from __future__ import annotations

import zlib

import pytest

from remesh.images import sums


@pytest.mark.parametrize("library", ["isal", "zlib"])
def test_either_library_gives_the_sums_and_the_bytes_of_zlib(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "zlib":
        monkeypatch.setattr(sums, "isal", None)
        assert sums.search_path() == ""
    elif sums.isal is None:
        pytest.skip("needs the package isal")
    for data in (b"", b"a", bytes(range(256)) * 33):
        assert sums.crc32(memoryview(data)) == zlib.crc32(data)
        assert zlib.decompress(sums.compress(memoryview(data))) == data
