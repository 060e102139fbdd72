"""What every test has: tiers by marker, missing tools that skip by name, one pool of ranks."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule
from xdist.scheduler import LoadFileScheduling

from remesh.carried.mpi.mpis import KINDS, find_all
from remesh.foundation.errors import ConfigError
from remesh.testbed.pool import RankPool
from tests import profiles  # noqa: F401 - loads a profile of Hypothesis
from tests.leftovers import watch

_SPECIAL_TIERS = ("mpi", "netns", "gpu", "browser", "hosts", "stores", "pods", "slow", "long")
"""Those that are run when they are asked for; they get the marker ``special``, by which pyproject.toml and the Makefile
leave them out."""

_TOGETHER = ("tests/rules/", "tests/unit/carried/mpi/library/")
"""Parse all sources; wait for a library that is compiled with checks."""

_HOSTS = ("accelerate", "lightning", "torchtitan", "transformers", "verl")
"""What `make hosts` installs, and tests of the tier need."""

_NOT_IN_UNITS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", "time.sleep"}
"""Events that start a process, by the names that Python's audit gives them, and sleep, which Python 3.13 audits."""
_unit_test: str | None = None
"""Name of the unit test that runs now."""
_file: Path | None = None
"""Of the test before."""
_RANKS = RankPool()
# Scripts that tests start import `tests.support` too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# torch asks the resolver for the name of every address that it connects to. Where that loses a packet, each of these
# costs the five seconds after which the C library asks again: as long as a host may be silent before it counts as lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
_may_hold_processes = False
"""Whether tests of other tiers have run since garbage was collected."""


def _hold_the_tier(event: str, *_: object) -> None:
    """A unit test starts no process and does not sleep: what waits, or takes seconds to start, is in another tier."""
    if _unit_test is not None and event in _NOT_IN_UNITS:
        raise RuntimeError(f"{_unit_test} is a unit test, and so starts no process and never sleeps, but: {event}")


sys.addaudithook(_hold_the_tier)


def _sleep(seconds: float, _really: Callable[[float], None] = time.sleep) -> None:
    if not seconds:
        os.sched_yield()  # which a sleep of 0 s is for: Python 3.13 audits that, too
        return
    _hold_the_tier("time.sleep")
    _really(seconds)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Know for the whole of a test, fixtures included, whether it is a unit test."""
    # An audit hook stays for the life of the process, and has no other way to know.
    global _unit_test, _may_hold_processes, _file
    is_unit = item.get_closest_marker("unit") is not None
    if is_unit and item.path != _file:
        # Files of unit tests come last. Of the groups of the others threads are left that look around all the time.
        _RANKS.close()
    _file = item.path
    if is_unit and _may_hold_processes:
        gc.collect()  # what ends its process when it is forgotten does so now, and not amid a unit test
    _may_hold_processes = not is_unit
    _unit_test = item.nodeid if is_unit else None
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", _sleep)
            return (yield)
    finally:
        _unit_test = None


_PAST_ITS_LIMIT_S = 60.0
_WORKER_DIED = pytest.StashKey[bool]()
_STDERR = pytest.StashKey[int]()
"""As it is outside of tests, whose output is caught."""


class _Doctests:
    """A plugin: files without an example in a docstring are not looked through for any, which takes seconds."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        found = yield
        return [one for one in found if not isinstance(one, DoctestModule) or ">>>" in file_path.read_text()]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)
    # What a conftest says of files is for those of its own folder.
    config.pluginmanager.register(_Doctests())


def pytest_sessionstart() -> None:
    watch()


class _ByFileOrFolder(LoadFileScheduling):
    """Every file in one worker, and so are all files of a folder that share what takes long to make."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((folder for folder in _TOGETHER if file.startswith(folder)), file)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFileOrFolder(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker that dies while it collects takes its tests along: the run has failed, whatever the others say."""
    if error:
        node.config.stash[_WORKER_DIED] = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    looks_well = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if looks_well and session.config.stash.get(_WORKER_DIED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays until the end: nobody looks through it for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """A test past its limit fails by a signal. Where no Python handler of signals runs, the session ends instead."""
    after_s = settings.timeout + _PAST_ITS_LIMIT_S
    faulthandler.dump_traceback_later(after_s, exit=True, file=item.config.stash[_STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test its tier, ``procs`` where the pool is used and ``unit`` where none is named.

    Units go first, so that what fails soon is seen soon. With several workers they go last: a worker that is through
    with its long tests has short ones to do while the others are not.
    """
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("procs")
        if any(item.get_closest_marker(tier) for tier in _SPECIAL_TIERS):
            item.add_marker("special")
        elif not item.get_closest_marker("procs"):
            item.add_marker("unit")
    items.sort(key=lambda item: item.get_closest_marker("unit") is None, reverse=hasattr(config, "workerinput"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose tools are not on this machine, naming the tool."""
    if item.get_closest_marker("mpi"):
        missing = [name for name in KINDS if isinstance(dict(find_all())[name], ConfigError)]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}, which `make mpi` installs")
    if item.get_closest_marker("netns") or item.get_closest_marker("pods"):
        for tool in ("ip", "tc", "unshare"):
            if shutil.which(tool) is None:
                pytest.skip(f"needs {tool}, which is not on the path")
        if os.geteuid() != 0:
            pytest.skip("needs root, for network namespaces")
    if item.get_closest_marker("hosts"):
        missing = [name for name in _HOSTS if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}, which `make hosts` installs")
    # A container may have been given another GPU than the machine's first.
    if item.get_closest_marker("gpu") and not [*Path("/dev").glob("nvidia[0-9]*")]:
        pytest.skip("needs a CUDA device, which this machine has not")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of ranks, started at its first run, and shared by all tests up to the next file of unit tests."""
    yield _RANKS
    _RANKS.close()
