"""The tables of the engine behave as dicts do."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, strategies as st

from remesh.carried.mpi.lower.numbered import Numbered

pytestmark = pytest.mark.unit

_numbers = st.one_of(st.integers(0, 40), st.integers(0, 8).map(lambda i: i << 32), st.integers(0, (1 << 64) - 1))
_changes = st.lists(st.tuples(st.sampled_from(["set", "set", "pop", "del", "get"]), _numbers), max_size=300)


@given(_changes)
def test_a_table_does_what_a_dict_does(changes: list[tuple[str, int]]) -> None:
    table, oracle = Numbered[object](), dict[int, object]()
    for turn, (what, number) in enumerate(changes):
        if what == "set":
            table[number] = oracle[number] = f"value {turn}"
        elif what == "pop":
            assert table.pop(number, None) == oracle.pop(number, None)
        elif what == "del" and number in oracle:
            del table[number], oracle[number]
        else:
            assert (table.get(number), number in table) == (oracle.get(number), number in oracle)
        assert len(table) == len(oracle)
    assert list(table.items()) == sorted(oracle.items())


def test_what_is_not_there_is_a_key_error() -> None:
    table = Numbered({1: "one"})
    for act in (lambda: table[2], lambda: table.pop(2), lambda: table.__delitem__(2)):
        with pytest.raises(KeyError, match="2"):
            act()


def test_a_table_holds_each_value_once() -> None:
    value = object()
    before = sys.getrefcount(value)
    table = Numbered(dict.fromkeys(range(100), value))
    table[7] = value
    assert sys.getrefcount(value) == before + 100
    for number in range(50):
        del table[number]
    assert sys.getrefcount(value) == before + 50
    del table
    assert sys.getrefcount(value) == before


def test_a_key_that_is_no_such_number_is_refused() -> None:
    table = Numbered[int]()
    for key in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            table[key] = 1
    with pytest.raises(TypeError):
        table["a"] = 1  # type: ignore[index]
