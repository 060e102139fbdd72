"""The job's store, against torch's own as the oracle."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from remesh.carried.torch.gate import Gate
from remesh.carried.torch.program_store import CarriedStore, StoreLink
from remesh.carried.torch.store_server import ProgramStore
from remesh.wire.messages import Line
from remesh.wire.token import Token

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


@given(acts=st.lists(_ACTS, max_size=20), is_beneath=st.booleans())
def test_every_act_answers_as_in_a_store_of_torch(
    link: StoreLink, acts: list[tuple[str, ...]], is_beneath: bool
) -> None:
    global _count
    _count += 1
    own = CarriedStore(link, f"{_count}/")
    theirs = dist.HashStore()
    # As programs have it: torch's C++ side asks ours.
    ours: dist.Store = dist.PrefixStore("", own) if is_beneath else own
    for name, *arguments in acts:
        assert getattr(ours, name)(*arguments) == getattr(theirs, name)(*arguments), (name, arguments)
    for key in ("a", "b", "c"):
        assert ours.check([key]) == theirs.check([key])
        if ours.check([key]):
            assert ours.get(key) == theirs.get(key)
    found = sorted(key.removeprefix("/") for key in own.list_keys())
    assert found == sorted(key for key in ("a", "b", "c", "number") if theirs.check([key]))


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


def test_many_who_wait_for_several_keys_get_them_when_the_last_is_there(link: StoreLink) -> None:
    chance = random.Random(5)
    keys = [f"key {number}" for number in range(6)]
    wanted = [chance.sample(keys, chance.randint(1, 4)) for _ in range(12)]
    got: dict[int, list[bytes]] = {}

    def wait(number: int) -> None:
        got[number] = CarriedStore(link, "many/").multi_get(wanted[number])

    threads = [threading.Thread(target=wait, args=(number,), daemon=True) for number in range(len(wanted))]
    for thread in threads:
        thread.start()
    store, there = CarriedStore(link, "many/"), set[str]()
    for key in chance.sample(keys, len(keys)):
        assert all(not set(wanted[number]) - there for number in got)
        there.add(key)
        store.set(key, key.upper())
    for thread in threads:
        thread.join(100)
    assert got == {number: [key.upper().encode() for key in those] for number, those in enumerate(wanted)}


def test_who_hangs_up_while_waiting_keeps_nobody_else_from_it(link: StoreLink) -> None:
    for asked in ([], ["left"]):
        line = Line.connect([link._address], _TOKEN, "testing")
        line.send({"type": "get", "keys": [*asked, "awaited"], "wait_s": 100})
        line.close()
    store = CarriedStore(link)
    store.set("left", "1")
    store.set("awaited", "2")
    assert store.multi_get(["left", "awaited"]) == [b"1", b"2"]


def test_a_timeout_that_is_set_through_a_prefix_holds(link: StoreLink) -> None:
    ours = CarriedStore(link, "timeout/")
    dist.PrefixStore("p", ours).set_timeout(timedelta(milliseconds=1))
    assert ours.timeout == timedelta(milliseconds=1)  # type: ignore[attr-defined]  # stubs lack this one
    with pytest.raises(dist.DistStoreError, match="not all are there"):
        dist.PrefixStore("p", ours).get("nobody sets it")


def test_what_cannot_be_done_is_refused_with_its_reason_and_the_store_goes_on(link: StoreLink) -> None:
    store = CarriedStore(link, "refused/")
    store.set("name", "hello")
    with pytest.raises(
        dist.DistStoreError, match="adding to refused/name: expected a whole number there, found 'hello'"
    ):
        store.add("name", 1)
    with pytest.raises(dist.DistStoreError, match="setting 2 keys to 1 values"):
        store.multi_set(["name", "other"], ["x"])
    assert (store.get("name"), store.check(["other"])) == (b"hello", False)


def test_a_value_may_be_as_long_as_in_the_store_of_torch(link: StoreLink) -> None:
    store, value = CarriedStore(link, "long/"), b"\0\xff" * (4 << 20)
    store.set("value", value)
    assert store.get("value") == value
