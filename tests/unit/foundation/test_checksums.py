"""Checksums and packed bytes have one form, whichever library makes them, and one home."""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import given, strategies as st


@pytest.fixture(params=["isal", "zlib"], scope="module")
def by_library(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module as it is where that library is the one."""
    if request.param == "isal":
        pytest.importorskip("isal")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "remesh.foundation.checksums", raising=False)
        if request.param == "zlib":
            patch.setitem(sys.modules, "isal", None)
        yield importlib.import_module("remesh.foundation.checksums")


@given(content=st.binary(max_size=200), seed=st.integers(0, 2**32 - 1))
def test_the_checksum_is_that_of_zlib(by_library: ModuleType, content: bytes, seed: int) -> None:
    assert by_library.crc32(content, seed) == zlib.crc32(content, seed)
    assert by_library.crc32(memoryview(content)) == zlib.crc32(content)


@given(content=st.binary(max_size=200), times=st.integers(0, 50))
def test_zlib_unpacks_what_was_packed(by_library: ModuleType, content: bytes, times: int) -> None:
    assert zlib.decompress(by_library.compress(memoryview(content * times))) == content * times


def test_a_bare_python_is_told_where_isal_is(by_library: ModuleType) -> None:
    found = by_library.search_path()
    assert found == "" if by_library.isal is None else by_library.isal.__file__.startswith(found + "/isal/")
