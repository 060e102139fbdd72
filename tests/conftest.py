"""What every test has: tiers by marker, missing tools that skip by name, one pool of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from remesh.errors import ConfigError
from remesh.mpi.mpis import KINDS, find_all
from remesh.testing.pool import RankPool

_SPECIAL_TIERS = ("mpi", "netns", "gpu", "browser", "slow")
"""Those that are run when they are asked for; they get the marker ``special``, by which pyproject.toml and the Makefile
leave them out."""

# The machine that runs the tests may be busy: a slow example is no failure. The seed is fixed so that a
# pull request fails by its own doing; `HYPOTHESIS_PROFILE=explore` looks for new cases.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test its tier, ``procs`` where the pool is used and ``unit`` where none is named; units go first."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("procs")
        if any(item.get_closest_marker(tier) for tier in _SPECIAL_TIERS):
            item.add_marker("special")
        elif not item.get_closest_marker("procs"):
            item.add_marker("unit")
    items.sort(key=lambda item: item.get_closest_marker("unit") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose tools are not on this machine, naming the tool."""
    if item.get_closest_marker("mpi"):
        missing = [name for name in KINDS if isinstance(dict(find_all())[name], ConfigError)]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}, which `make mpi` installs")
    if item.get_closest_marker("netns"):
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                pytest.skip(f"needs {tool}, which is not on the path")
        if os.geteuid() != 0:
            pytest.skip("needs root, for network namespaces")
    if item.get_closest_marker("gpu") and not Path("/dev/nvidia0").exists():
        pytest.skip("needs a CUDA device, which this machine has not")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of ranks, started at its first run and shared by the whole session."""
    pool = RankPool()
    yield pool
    pool.close()
