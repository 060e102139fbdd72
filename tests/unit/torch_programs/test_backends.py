"""Which groups a program may make."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import pytest

from remesh.errors import ConfigError
from remesh.torch_programs.backends import Backends
from remesh.torch_programs.gate import Gate


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
