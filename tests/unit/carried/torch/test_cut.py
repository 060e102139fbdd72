"""Where a process says that it stands, while its collectives are called, waited for and held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import pytest
import torch
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from remesh.carried.rounds.status import Activity, Status
from remesh.carried.torch.cut import GroupsAtCut
from remesh.carried.torch.gate import Gate
from remesh.carried.torch.groups import CarriedGroup, GroupPlace, Groups, Recipe

_KEY: Final = "0"
_PATIENCE_S: Final = 20.0


class _Real:
    """A real group whose calls return, and whose works end, when they may."""

    def __init__(self) -> None:
        self.called, self.may_return, self.may_end = threading.Event(), threading.Event(), threading.Event()
        self.may_return.set()

    def allreduce(self, *_: object) -> Any:
        self.called.set()
        self.may_return.wait(_PATIENCE_S)
        may_end = self.may_end

        class Ends(Work):
            def wait(self, *_: object) -> bool:
                return may_end.wait(_PATIENCE_S)

            def is_completed(self) -> bool:
                return may_end.is_set()

        return Ends()


class _Carried(CarriedGroup):
    def build(self, store: object) -> None:
        self._real = cast(ProcessGroup, store)


class _Process:
    """A process with one group, in which one collective is on its way."""

    def __init__(self) -> None:
        self.real, self.gate = _Real(), Gate()
        groups = Groups(self.gate)
        recipe = Recipe("gloo", ProcessGroup.BackendType.GLOO, "cpu", lambda _: None)
        self.group = _Carried(self.gate, GroupPlace(_KEY, (0, 1), 0), recipe, cast(Any, self.real))
        groups.all.append(self.group)
        groups.members[_KEY] = (0, 1)
        self.cut = GroupsAtCut(groups, cast(Any, None), 0, 2)
        self.threads: list[threading.Thread] = []

    def begin(self, *, is_async: bool, length: int = 1) -> None:
        """Call an all_reduce in a thread."""
        options = AllreduceOptions()
        options.asyncOp = is_async
        self.aside(lambda: self.group.allreduce([torch.ones(length)], options))
        assert self.real.called.wait(_PATIENCE_S)

    def aside(self, call: Callable[[], Any]) -> None:
        self.threads.append(threading.Thread(target=call))
        self.threads[-1].start()

    def describe_once(self, activity: Activity) -> Status:
        """Where it stands, once it says that it does this."""
        for _ in range(2000):
            if (status := self.cut.describe()).activity is activity:
                return status
            threading.Event().wait(_PATIENCE_S / 2000)
        raise AssertionError(status)


@pytest.fixture
def process() -> Iterator[_Process]:
    made = _Process()
    yield made
    made.gate.open()
    made.real.may_return.set()
    made.real.may_end.set()
    for thread in made.threads:
        thread.join(_PATIENCE_S)


def test_a_call_that_has_not_returned_has_to_end(process: _Process) -> None:
    process.real.may_return.clear()
    process.begin(is_async=False)
    process.gate.hold({})
    standing = process.describe_once(Activity.INSIDE).standing(_KEY)
    assert standing is not None
    # The building of the group was the first one.
    assert (standing.entered, standing.completed, standing.reached) == (2, 2, 1)


def test_a_call_that_waits_for_what_can_begin_anew_is_held(process: _Process) -> None:
    process.begin(is_async=False)
    process.gate.hold({})
    status = process.describe_once(Activity.HELD)
    standing = status.standing(_KEY)
    assert standing is not None
    assert (standing.entered, standing.completed, standing.reached) == (2, 1, 1)
    assert status.at == (_KEY,)


def test_a_work_that_nobody_waits_for_lets_its_program_compute(process: _Process) -> None:
    process.begin(is_async=True)
    process.threads[0].join(_PATIENCE_S)
    process.gate.hold({})
    status = process.describe_once(Activity.COMPUTING)
    assert status.at == (_KEY,)


def test_what_has_to_end_is_waited_for_by_a_thread_of_ours(process: _Process) -> None:
    process.begin(is_async=True, length=1 << 20)
    process.threads[0].join(_PATIENCE_S)
    process.gate.hold({})
    standing = process.describe_once(Activity.INSIDE).standing(_KEY)
    assert standing is not None
    assert (standing.entered, standing.completed, standing.reached) == (2, 2, 1)
    process.real.may_end.set()
    standing = process.describe_once(Activity.COMPUTING).standing(_KEY)
    assert standing is not None
    assert standing.reached == 2


def test_who_waits_at_the_gate_has_not_entered(process: _Process) -> None:
    process.gate.hold({})
    process.aside(lambda: process.group.allreduce([torch.ones(1)], AllreduceOptions()))
    status = process.describe_once(Activity.HELD)
    standing = status.standing(_KEY)
    assert standing is not None
    assert (standing.entered, standing.completed, standing.reached) == (1, 1, 1)
    assert status.at == (_KEY,)
