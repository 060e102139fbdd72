"""A refit of one rank: readers see one version, whole, whatever is started when."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest
import torch

from remesh.foundation.errors import PeerError, PlanError
from remesh.resharding.refit import Refit, RefitHandle

SIZE = 1 << 16


def state(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((SIZE,), float(version)), "v": torch.full((3, 5), float(version))}


def versions_in(refit: Refit) -> set[float]:
    """The version that a snapshot is named after, and all that it has elements of."""
    with refit.read() as snapshot:
        found = {float(snapshot.version)}
        for tensor in snapshot.tensors.values():
            assert isinstance(tensor, torch.Tensor)
            found |= {float(tensor.min()), float(tensor.max())}
    return found


def test_a_second_start_before_the_result_is_refused_and_readers_see_one_version() -> None:
    refit = Refit(state(-1))
    handles = [refit.start(state(1), 1)]
    with pytest.raises(PlanError, match=r"version 1 was started .* call result\(\)"):
        handles.append(refit.start(state(2), 2))
    handles[0].result()
    assert versions_in(refit) == {1.0}


def test_a_result_that_is_asked_for_again_turns_nothing_over() -> None:
    refit = Refit(state(-1))
    first = refit.start(state(1), 1)
    first.result()
    refit.push(state(2), 2)
    first.result()
    assert (refit.version, versions_in(refit)) == (2, {2.0})


def test_after_an_error_the_next_one_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    refit = Refit(state(-1))
    refit.push(state(1), 1)
    handle = refit.start(state(2), 2)
    handle._handle.wait()
    monkeypatch.setattr(handle._handle, "_error", RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        handle.result()
    assert versions_in(refit) == {1.0}
    refit.push(state(3), 3)
    assert versions_in(refit) == {3.0}


@pytest.mark.parametrize("seed", range(4))
def test_readers_see_whole_versions_whatever_is_started_and_asked_for(seed: int) -> None:
    chance = random.Random(seed)
    refit = Refit(state(-1))
    refit.push(state(0), 0)
    stop = threading.Event()
    mixed: list[set[float]] = []

    def read_on() -> None:
        while not stop.is_set():
            found = versions_in(refit)
            if len(found) > 1:
                mixed.append(found)

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    handles: list[RefitHandle] = []
    refused = 0
    for version in range(1, 60):
        if chance.random() < 0.6:
            try:
                handles.append(refit.start(state(version), version))
            except PlanError:
                refused += 1
        elif handles:
            # Any handle, also one whose result has been asked for.
            chance.choice(handles[-3:]).result()
    for handle in handles:
        handle.result()
    stop.set()
    for reader in readers:
        reader.join()
    assert not mixed
    assert refused
    assert versions_in(refit) == {float(handles[-1].version)}


def test_in_place_a_generator_has_one_buffer_and_readers_see_whole_versions() -> None:
    take = state(-1)
    refit = Refit(take, in_place=True)
    for version in (1, 2, 3):
        refit.push(state(version), version)
        assert versions_in(refit) == {float(version)}
        with refit.read() as snapshot:
            assert snapshot.tensors["w"] is take["w"]


def test_in_place_readers_wait_for_the_version_that_is_on_its_way() -> None:
    refit = Refit(state(-1), in_place=True)
    refit.push(state(1), 1)
    handle = refit.start(state(2), 2)
    seen: list[set[float]] = []
    reader = threading.Thread(target=lambda: seen.append(versions_in(refit)))
    reader.start()
    handle._handle.wait()
    assert not seen, "nobody has asked for the result"
    handle.result()
    reader.join()
    assert seen == [{2.0}]


def test_in_place_a_reader_is_told_who_waits_for_whom() -> None:
    refit = Refit(state(-1), in_place=True, readers_timeout_s=0.01)
    handle = refit.start(state(1), 1)
    with pytest.raises(PeerError, match=r"call result\(\) of its handle, in another thread"), refit.read():
        pass
    handle.result()
    with refit.read(), pytest.raises(PeerError, match="readers hold a snapshot"):
        refit.push(state(2), 2)
    assert versions_in(refit) == {1.0}, "nothing has moved"


def test_in_place_a_version_that_did_not_arrive_is_shown_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    refit = Refit(state(-1), in_place=True)
    refit.push(state(1), 1)
    handle = refit.start(state(2), 2)
    handle._handle.wait()
    monkeypatch.setattr(handle._handle, "_error", RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        handle.result()
    assert refit.version is None
    with (
        pytest.raises(PlanError, match="version 2 was moved into them in place and did not arrive whole"),
        refit.read(),
    ):
        pass
    with pytest.raises(PlanError):
        refit.push(state(3), None)  # no version: agreed on by nobody
    refit.push(state(3), 3)
    assert versions_in(refit) == {3.0}


def test_in_place_a_refused_start_lets_nobody_read_what_is_being_written() -> None:
    refit = Refit(state(-1), in_place=True, readers_timeout_s=0.01)
    handle = refit.start(state(1), 1)
    with pytest.raises(PlanError, match="version 1 was started"):
        refit.start(state(2), 2)
    with pytest.raises(PeerError), refit.read():
        pass
    handle.result()
    assert versions_in(refit) == {1.0}


def test_what_readers_have_queued_on_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    refit = Refit({"w": torch.zeros(3)})
    called: list[tuple[int, str]] = []
    for number, order in enumerate(refit._orders):
        for name in ("begin_read", "end_read", "begin_write", "end_write"):
            monkeypatch.setattr(order, name, partial(called.append, (number, name)))
    for version in (1, 2):
        refit.push({"w": torch.full((3,), float(version))}, version)
        with refit.read():
            called.append((9, "reads"))
    one = [(0, "begin_write"), (0, "end_write"), (0, "begin_read"), (9, "reads"), (0, "end_read")]
    other = [(1 if number == 0 else number, name) for number, name in one]
    assert called == one + other
