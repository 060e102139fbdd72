"""A store on etcd does what it is asked once, whatever answers are lost, and waits for a server within a bound."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from remesh.elasticity.launch import etcd
from remesh.elasticity.launch.etcd import ETCD_TIMEOUT_S, EtcdClient, EtcdStore


class _Server:
    """Keys of an etcd with their modification numbers, and what goes wrong with a request."""

    def __init__(self, fault: Callable[[], tuple[Exception, bool] | None] = lambda: None) -> None:
        self.keys: dict[str, tuple[str, int]] = {}
        self.revision = 0
        self.num_asked = 0
        self.fault = fault
        """The error that a request ends with, and whether it was carried out nevertheless."""

    def ask(self, path: str, body: bytes) -> dict[str, Any]:
        self.num_asked += 1
        if (broken := self.fault()) is None:
            return self._answer(path, json.loads(body))
        error, is_done = broken
        if is_done:
            self._answer(path, json.loads(body))
        raise error

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        match path.rpartition("/")[2]:
            case "range":
                return self._range(body)
            case "put":
                self.revision += 1
                self.keys[body["key"]] = body["value"], self.revision
                return {}
            case _:
                return self._transact(body)

    def _range(self, body: dict[str, Any]) -> dict[str, Any]:
        found = self.keys.get(body["key"])
        return {} if found is None else {"kvs": [{"value": found[0], "mod_revision": str(found[1])}]}

    def _transact(self, body: dict[str, Any]) -> dict[str, Any]:
        [compare] = body["compare"]
        if self.keys.get(compare["key"], ("", 0))[1] != int(compare["modRevision"]):
            return {"responses": [{"response_range": self._range(one["requestRange"])} for one in body["failure"]]}
        self.revision += 1
        for one in body["success"]:
            self.keys[one["requestPut"]["key"]] = one["requestPut"]["value"], self.revision
        return {"succeeded": True, "header": {"revision": str(self.revision)}}


class _Clock:
    """Time that passes while somebody sleeps, and with each look at it."""

    LOOK_S = 4.0

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += self.LOOK_S
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "time", _Clock())


def _client_of(server: _Server) -> EtcdClient:
    client = EtcdClient("nowhere", 1)
    client._ask = server.ask  # type: ignore[method-assign]
    return client


@pytest.mark.parametrize("seed", range(20))
def test_numbers_are_added_once_though_answers_are_lost(seed: int) -> None:
    chance = random.Random(seed)

    def fault() -> tuple[Exception, bool] | None:
        return (TimeoutError("timed out"), chance.random() < 0.5) if chance.random() < 0.3 else None

    server = _Server(fault)
    stores = [EtcdStore(_client_of(server), "job/") for _ in range(3)]
    assert [chance.choice(stores).add("came", 1) for _ in range(30)] == [*range(1, 31)]
    server.fault = lambda: None
    assert stores[0].get("came") == b"30"


def test_a_value_that_was_set_though_no_answer_came_is_what_its_setter_gets() -> None:
    server = _Server()
    store = EtcdStore(_client_of(server), "job/")
    assert store.check(["leader"]) is False
    answers = iter([None, (TimeoutError("timed out"), True), None])
    server.fault = lambda: next(answers)
    assert store.compare_set("leader", "", "me") == b"me"


def test_a_server_that_takes_long_is_waited_for() -> None:
    answers = iter([(TimeoutError("timed out"), False), (etcd._UnavailableError("status 503"), False), None])
    assert _client_of(_Server(lambda: next(answers))).get("key") is None


def test_a_server_that_answers_no_more_is_waited_for_within_a_bound() -> None:
    server = _Server()
    client = _client_of(server)
    client.put("key", b"1")
    server.fault = lambda: (ConnectionRefusedError("Connection refused"), False)
    with pytest.raises(RendezvousConnectionError, match="asking etcd at nowhere:1: ConnectionRefusedError"):
        client.get("key")
    num_asked = server.num_asked
    assert 2 < num_asked < 3 + ETCD_TIMEOUT_S / _Clock.LOOK_S
    with pytest.raises(RendezvousConnectionError):
        client.get("key")
    assert server.num_asked == num_asked + 1, "nobody who ends waits for it again"
    server.fault = lambda: None
    assert client.get("key") == (b"1", 1)


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), ValueError("status 404, b'not found'")], ids=repr)
def test_a_server_that_is_not_there_or_is_no_etcd_is_told_at_once(error: Exception) -> None:
    server = _Server(lambda: (error, False))
    with pytest.raises(RendezvousConnectionError):
        _client_of(server).get("key")
    assert server.num_asked == 1


def test_keys_and_values_are_bytes() -> None:
    server = _Server()
    EtcdStore(_client_of(server), "job/").set("key", bytes(range(256)))
    assert base64.b64decode(next(iter(server.keys))) == b"job/key"
    assert EtcdStore(_client_of(server), "job/").get("key") == bytes(range(256))
