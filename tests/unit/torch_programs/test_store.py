"""The job's store, against torch's own as the oracle."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from remesh.comm.token import Token
from remesh.torch_programs.gate import Gate
from remesh.torch_programs.store import CarriedStore, StoreLink
from remesh.torch_programs.store_server import ProgramStore

_TOKEN = Token("", b"0123456789abcdef")


@pytest.fixture(scope="module")
def link() -> Iterator[StoreLink]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with ProgramStore(_TOKEN, listener, {}, lambda _: None):
        link = StoreLink(Gate(), address, _TOKEN)
        yield link
        link.drop()


_KEYS = st.sampled_from(["a", "b", "c"])
_VALUES = st.binary(max_size=4).filter(bool)
_NUMBERS = st.integers(-5, 5)
_ACTS = st.one_of(
    st.tuples(st.just("set"), _KEYS, _VALUES),
    st.tuples(st.just("append"), _KEYS, _VALUES),
    st.tuples(st.just("delete_key"), _KEYS),
    st.tuples(st.just("check"), st.lists(_KEYS, min_size=1, max_size=2)),
    st.tuples(st.just("compare_set"), _KEYS, _VALUES, _VALUES),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.tuples(_VALUES, _VALUES)),
    st.tuples(st.just("add"), st.just("number"), _NUMBERS),
)
_count = 0


@given(acts=st.lists(_ACTS, max_size=20))
def test_every_act_answers_as_in_a_store_of_torch(link: StoreLink, acts: list[tuple[str, ...]]) -> None:
    global _count
    _count += 1
    ours, theirs = CarriedStore(link, f"{_count}/"), dist.HashStore()
    for name, *arguments in acts:
        assert getattr(ours, name)(*arguments) == getattr(theirs, name)(*arguments), (name, arguments)
    for key in ("a", "b", "c"):
        assert ours.check([key]) == theirs.check([key])
        if ours.check([key]):
            assert ours.get(key) == theirs.get(key)
    assert sorted(ours.list_keys()) == sorted(key for key in ("a", "b", "c", "number") if theirs.check([key]))


def test_who_waits_for_a_key_gets_it_when_it_is_set(link: StoreLink) -> None:
    store = dist.PrefixStore("through/", CarriedStore(link, "waits/"))
    with pytest.raises(RuntimeError):
        store.wait(["late"], timedelta(milliseconds=1))
    store.set("late", "now")
    store.wait(["late"], timedelta(seconds=20))
    assert store.get("late") == b"now"


def test_what_is_not_there_in_time_is_told_by_name(link: StoreLink) -> None:
    with pytest.raises(dist.DistStoreError, match="never"):
        CarriedStore(link).wait(["never"], timedelta(milliseconds=1))
