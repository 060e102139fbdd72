"""A refit of one rank: readers see one version, whole, whatever is started when."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from remesh.errors import PlanError
from remesh.reshard.refit import Refit, RefitHandle

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
