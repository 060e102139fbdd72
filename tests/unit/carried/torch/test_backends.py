"""Which groups a program may make."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.distributed import DebugLevel, HashStore, Store

from remesh.carried.torch.backends import Backends
from remesh.carried.torch.gate import Gate
from remesh.foundation.errors import ConfigError


@pytest.fixture
def backends() -> Backends:
    return Backends(Gate(), cast(Any, None), 0, 1)


@pytest.fixture
def c10d(backends: Backends) -> Any:
    """Where torch looks for constructors."""
    module: Any = ModuleType("c10d")
    module.ProcessGroupGloo = type("ProcessGroupGloo", (), {})
    backends.install(module)
    return module


def test_a_group_that_a_library_makes_by_its_constructor_is_refused_by_name(c10d: Any) -> None:
    """Nothing tells who its members are."""
    with pytest.raises(ConfigError, match="making a gloo group by its constructor"):
        c10d.ProcessGroupGloo(None, 0, 1)


def test_it_is_no_other_name_of_the_last_group_that_torch_made(backends: Backends, c10d: Any) -> None:
    backends.make_by(lambda *_: None, 1, 0, [0], "gloo", None, "pg")
    with pytest.raises(ConfigError, match="making a gloo group by its constructor"):
        c10d.ProcessGroupGloo(None, 0, 1)
    assert backends.groups.all == []


def test_a_group_finds_no_address_of_an_earlier_one_of_its_name(backends: Backends) -> None:
    """torch begins to count again once all groups are destroyed, and the store is that of the job."""
    found = []

    def connect(store: Store, rank: int, size: int) -> None:
        found.append(store.check(["0"]))
        store.set("0", "the address of rank 0")
        raise RuntimeError("nobody is there")

    module: Any = ModuleType("c10d")
    module.ProcessGroupGloo = connect
    store = HashStore()
    backends.install(module)
    make = lambda *_: module.ProcessGroupGloo(store, 0, 1)  # noqa: E731
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nobody is there"):
            backends.make_by(make, 1, 0, [], "gloo", store, "pg")
    assert found == [False, False]


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 1)])
def test_a_default_group_with_other_ranks_than_the_launchers_is_refused(rank: int, size: int) -> None:
    """By a store of the program's own, which no rendezvous sees."""
    backends = Backends(Gate(), cast(Any, None), 0, 2)
    module: Any = ModuleType("c10d")
    module.ProcessGroupGloo = type("ProcessGroupGloo", (), {})
    backends.install(module)
    make = lambda *_: module.ProcessGroupGloo(None, rank, size)  # noqa: E731
    with pytest.raises(ConfigError, match=f"as rank {rank} of {size}: the launcher made this process rank 0 of 2"):
        backends.make_by(make, size, rank, [], "gloo", None, "pg")
    assert backends.groups.all == []


@pytest.fixture
def _detail() -> Iterator[None]:
    """The level, chosen as a program does."""
    before = dist.get_debug_level()
    dist.set_debug_level(DebugLevel.DETAIL)
    yield
    dist.set_debug_level(before)


def _make_with_checks(backends: Backends, backend: str, real: Any) -> None:
    module: Any = ModuleType("c10d")
    module.ProcessGroupGloo = module.ProcessGroupNCCL = real
    backends.install(module)
    store = HashStore()
    backends.make_by(lambda *_: module.ProcessGroupGloo(store, 0, 1), 1, 0, [0], backend, store, "pg")


def test_members_compare_their_calls_over_a_second_group_at_the_debug_level_for_it(
    backends: Backends, monkeypatch: pytest.MonkeyPatch, _detail: None
) -> None:
    """As under torch alone; a program may choose it after its start."""
    made = []

    def connect(store: Store, rank: int, size: int) -> str:
        assert not store.check(["0"])
        store.set("0", "the address of rank 0")
        made.append(f"group {len(made)}")
        return made[-1]

    def compare(one: str, other: str) -> None:
        raise RuntimeError(f"{one} over {other}")

    monkeypatch.setattr("remesh.carried.torch.backends.GroupThatCompares", compare)
    with pytest.raises(RuntimeError, match="group 0 over group 1"):
        _make_with_checks(backends, "gloo", connect)


def test_communicators_behind_such_a_group_are_refused(backends: Backends, _detail: None) -> None:
    """Nothing would end them at a cut."""
    with pytest.raises(ConfigError, match="over NCCL with TORCH_DISTRIBUTED_DEBUG=DETAIL"):
        _make_with_checks(backends, "nccl", None)
