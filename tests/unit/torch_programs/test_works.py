"""What the program is given for a collective, and what is kept of it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from remesh.torch_programs.gate import Gate
from remesh.torch_programs.groups import CarriedGroup, GroupPlace, Recipe
from remesh.torch_programs.works import ENDED


class _Real:
    """A real group in which nothing has to be waited for."""

    def __init__(self) -> None:
        self.waits: list[Work] = []

    def allreduce(self, tensors: list[torch.Tensor], _: AllreduceOptions) -> Any:
        real, future = self, torch.futures.Future[list[torch.Tensor]]()
        future.set_result(tensors)

        class Done(Work):
            def wait(self, *_: object) -> bool:
                real.waits.append(self)
                return True

            def is_completed(self) -> bool:
                return True

            def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
                return future

        return Done()


def _group(real: _Real) -> CarriedGroup:
    class Carried(CarriedGroup):
        def build(self, store: object) -> None:
            self._real = cast(ProcessGroup, real)

    recipe = Recipe("gloo", ProcessGroup.BackendType.GLOO, "cpu", lambda _: None)
    return Carried(Gate(), GroupPlace("0", (0,), 0), recipe, cast(Any, None))


def _options(*, is_async: bool) -> AllreduceOptions:
    options = AllreduceOptions()
    options.asyncOp = is_async
    return options


def test_a_call_that_waits_itself_has_ended_when_it_returns() -> None:
    real = _Real()
    group = _group(real)
    work = group.allreduce([torch.ones(1)], _options(is_async=False))
    assert work is ENDED
    assert len(real.waits) == 1
    assert work.wait() and work.is_completed() and work.is_success()
    assert group.under_way() == []


def test_a_work_that_has_ended_still_has_its_future() -> None:
    group, value = _group(_Real()), torch.ones(1)
    work = group.allreduce([value], _options(is_async=True))
    assert group.under_way() == []
    assert work.get_future().value()[0] is value


def test_a_work_is_waited_for_once() -> None:
    real = _Real()
    work = _group(real).allreduce([torch.ones(1)], _options(is_async=True))
    assert work.wait() and work.wait() and work.is_success() and work.exception() is None
    assert len(real.waits) == 1
