"""The unit tier is what it says: a test that starts a process, or sleeps, is told so."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    "act",
    [lambda: time.sleep(0.001), lambda: subprocess.run(["true"], check=True), os.fork],
    ids=["sleep", "run", "fork"],
)
def test_a_unit_test_that_leaves_its_tier_fails(act: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="is a unit test, and so starts no process and never sleeps"):
        act()


@pytest.mark.procs
def test_a_test_of_another_tier_may() -> None:
    assert subprocess.run(["true"], check=True).returncode == 0
