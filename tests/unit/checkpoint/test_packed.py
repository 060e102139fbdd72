"""Packed integers come back, whatever their width, and equal ones make equal texts."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, strategies as st

from remesh.checkpoint.values.outline import pack, unpack


@given(st.lists(st.integers(-(2**63), 2**63 - 1)) | st.lists(st.integers(-200, 200)))
def test_integers_come_back_through_json(numbers: list[int]) -> None:
    text = pack(numbers)
    assert unpack(json.loads(json.dumps(text))).tolist() == numbers
    assert pack(np.array(numbers, dtype=np.int64)) == text


def test_small_integers_take_little_room() -> None:
    assert len(pack([0, 1] * 500)) < 1400
    assert len(pack([2**40])) < 20
