"""A run of tests that ends where no code of it runs any more takes along what its tests have started."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from remesh.foundation.linux.procfs import start_of
from remesh.testbed.quiet_limit import QuietLimit
from tests.rules.source_tree import ROOT

pytestmark = pytest.mark.procs

_RUN = """
import os, signal, subprocess, sys
from tests.leftovers import watch

watch()
alone = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", alone], check=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_who_outlives_a_killed_run_is_killed_too() -> None:
    done = subprocess.run([sys.executable, "-c", _RUN], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    left = int(done.stdout)
    limit = QuietLimit(lambda: 0, 200.0)
    while start_of(left) is not None:
        assert not limit.is_over(), f"process {left} runs on"


def test_a_test_that_may_take_long_does_not_end_its_session(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When every stack is dumped and the session ends: after the limit of the test, whatever it is."""
    told: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda timeout, **_: told.append(timeout))
    conftest: Any = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    conftest.pytest_timeout_set_timer(item=request.node, settings=SimpleNamespace(timeout=500.0))
    assert told and told[0] > 500.0
