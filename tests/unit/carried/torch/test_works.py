"""What the program is given for a collective, and what is kept of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

import pytest
import torch
from torch.distributed import AllreduceOptions, ProcessGroup, Work

from remesh.carried.torch import anew, groups
from remesh.carried.torch.gate import Gate
from remesh.carried.torch.groups import CarriedGroup, GroupPlace, Recipe
from remesh.carried.torch.works import ENDED, see_under_way
from remesh.foundation.errors import ConfigError, PeerError

_PATIENCE_S: Final = 20.0


@pytest.fixture(autouse=True, params=["built", "not built"])
def _extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extension in C, and without."""
    if request.param == "not built":
        for module in (anew, groups):
            monkeypatch.setattr(module, "SHORT", None)
    elif groups.SHORT is None:
        pytest.skip("needs the C extension of torch_programs: python hatch_build.py")


class _Real:
    """A real group in which nothing has to be waited for."""

    def __init__(self) -> None:
        self.waits: list[Work] = []
        self.on_wait: list[Callable[[], None]] = []
        """What the next waits do, in place of ending."""

    def broadcast(self, *_: object) -> Any:
        raise ValueError("the root is no member")

    def allreduce(self, tensors: list[torch.Tensor], _: AllreduceOptions) -> Any:
        real, future = self, torch.futures.Future[list[torch.Tensor]]()
        future.set_result(tensors)

        class Done(Work):
            error: Exception | None = None
            """Told to everybody who waits, as by gloo."""

            def wait(self, *_: object) -> bool:
                real.waits.append(self)
                if real.on_wait:
                    try:
                        real.on_wait.pop(0)()
                    except Exception as error:
                        self.error = error
                if self.error is not None:
                    raise self.error
                return True

            def is_completed(self) -> bool:
                return True

            def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
                return future

        return Done()


class _Slow(Work):
    """Ends when it may; a wait with a timeout is over at once before that, as one of torch is after its time."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end, self.is_waited_for = threading.Event(), threading.Event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.is_waited_for.set()
        if timeout and not self.may_end.is_set():
            raise RuntimeError("Operation timed out!")
        return self.may_end.wait(_PATIENCE_S)

    def is_completed(self) -> bool:
        return self.may_end.is_set()

    def get_future(self) -> Any:
        raise RuntimeError("none")


def _group_with(slow: _Slow) -> CarriedGroup:
    real = _Real()
    real.allreduce = lambda *_: slow  # type: ignore[method-assign]
    return _group(real)


class _NeverDone(Work):
    def is_completed(self) -> bool:
        return False


def _group(real: _Real, device: str = "cpu") -> CarriedGroup:
    class Carried(CarriedGroup):
        def build(self, store: object) -> None:
            self._use(cast(ProcessGroup, real))

    recipe = Recipe("gloo", ProcessGroup.BackendType.GLOO, device, lambda _: None)
    return Carried(Gate(), GroupPlace("0", (0,), 0), recipe, cast(Any, None))


def _options(*, is_async: bool) -> AllreduceOptions:
    options = AllreduceOptions()
    options.asyncOp = is_async
    return options


def test_what_a_graph_of_a_device_captures_is_refused_and_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _group(_Real(), "cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="allreduce .* CUDA graph"):
        group.allreduce([torch.ones(1)], _options(is_async=True))
    with pytest.raises(ConfigError, match="message .* CUDA graph"):
        group.send([torch.ones(1)], 0)
    assert not group.has_open_ends
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    group.allreduce([torch.ones(1)], _options(is_async=True)).wait()


def test_a_call_that_waits_itself_has_ended_when_it_returns() -> None:
    real = _Real()
    group = _group(real)
    work = group.allreduce([torch.ones(1)], _options(is_async=False))
    assert work is ENDED
    assert len(real.waits) == 1
    assert work.wait() and work.is_completed() and work.is_success()
    assert group.has_open_ends is False


def test_a_work_that_has_ended_still_has_its_future() -> None:
    group, value = _group(_Real()), torch.ones(1)
    work = group.allreduce([value], _options(is_async=True))
    assert group.has_open_ends is False
    assert work.get_future().value()[0] is value


def test_a_work_is_waited_for_once() -> None:
    real = _Real()
    work = _group(real).allreduce([torch.ones(1)], _options(is_async=True))
    assert work.wait() and work.wait() and work.is_success() and work.exception() is None
    assert len(real.waits) == 1


def test_a_wait_that_is_over_before_the_collective_leaves_that_to_a_later_wait() -> None:
    group = _group_with(slow := _Slow())
    work = group.allreduce([torch.ones(1)], _options(is_async=True))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(milliseconds=1))
        assert not work.is_completed() and work.exception() is None
        assert group.has_open_ends, "a cut has to know of it"
    slow.may_end.set()
    assert work.wait(timedelta(milliseconds=1)) and work.is_success()
    assert not group.has_open_ends


def test_a_wait_is_over_after_its_timeout_though_another_thread_waits_without_one() -> None:
    """As that of a round does."""
    work = _group_with(slow := _Slow()).allreduce([torch.ones(1)], _options(is_async=True))
    aside = threading.Thread(target=work.wait)
    aside.start()
    assert slow.is_waited_for.wait(_PATIENCE_S)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=1))
    slow.may_end.set()
    aside.join(_PATIENCE_S)
    assert work.wait(timedelta(milliseconds=1))


def test_a_wait_that_is_over_during_a_checkpoint_goes_on_after_it() -> None:
    """The time in which nothing moves is not the program's."""
    group = _group_with(slow := _Slow())
    work = group.allreduce([torch.ones(1)], _options(is_async=True))
    group._gate.hold({})
    group._gate.close()
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(work.wait(timedelta(milliseconds=1))))
    waiter.start()
    assert slow.is_waited_for.wait(_PATIENCE_S)
    slow.may_end.set()
    group._gate.open()
    waiter.join(_PATIENCE_S)
    assert found == [True]


def test_a_call_that_is_cut_off_while_it_waits_ends_in_the_next_group() -> None:
    real, next_real = _Real(), _Real()
    group, value = _group(real), torch.ones(1)
    gate = group._gate

    def cut_off() -> None:
        gate.hold({})
        gate.close()
        see_under_way(gate, group._tally)  # as who answers a round does
        value.fill_(5)  # gloo leaves partial sums
        threading.Thread(target=go_on).start()
        raise RuntimeError("connection closed")

    def go_on() -> None:
        assert group.shed(_PATIENCE_S)
        group._use(cast(ProcessGroup, next_real))
        group.begin_anew()
        gate.open()

    real.on_wait.append(cut_off)
    assert group.allreduce([value], _options(is_async=False)) is ENDED
    assert (len(set(real.waits)), len(next_real.waits)) == (1, 1)
    assert value.item() == 1
    assert not group.has_open_ends


def test_a_collective_that_fails_says_so_to_the_call_that_waits_and_is_over() -> None:
    real = _Real()
    group = _group(real)

    def fail() -> None:
        raise RuntimeError("peer is gone")

    real.on_wait.append(fail)
    with pytest.raises(RuntimeError, match="peer is gone"):
        group.allreduce([torch.ones(1)], _options(is_async=False))
    assert not group.has_open_ends


def test_a_collective_that_the_real_group_refuses_was_never_entered() -> None:
    group = _group(_Real())
    with pytest.raises(ValueError, match="no member"):
        group.broadcast([torch.ones(1)], _options(is_async=True))
    assert (group._tally.entered, group._tally.under_way) == (1, {})


def test_what_is_refused_to_a_call_that_waits_was_never_entered() -> None:
    group = _group(_Real())
    with pytest.raises(ValueError, match="no member"):
        group.broadcast([torch.ones(1)], _options(is_async=False))
    assert (group._tally.entered, group._tally.under_way) == (1, {})


def test_a_call_that_has_not_returned_is_seen_as_inside_and_one_that_waits_as_waiting() -> None:
    real, seen = _Real(), []

    class Looks(_Real):
        def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions) -> Any:
            look()
            return real.allreduce(tensors, options)

    def look() -> None:
        (one,) = see_under_way(group._gate, group._tally)
        seen.append((one.number, one.is_inside, one.can_begin_anew and not one.is_inside, one.is_waited_for))

    group = _group(Looks())
    real.on_wait.append(look)
    assert group.allreduce([torch.ones(1)], _options(is_async=False)) is ENDED
    assert [each[:3] for each in seen] == [(2, True, False), (2, False, True)]
    assert seen[1][3]
    assert not group._tally.under_way


def test_a_call_that_fails_while_a_round_looks_at_it_raises_once_the_gate_is_open() -> None:
    real = _Real()
    group = _group(real)

    def fail() -> None:
        see_under_way(group._gate, group._tally)
        raise RuntimeError("peer is gone")

    real.on_wait.append(fail)
    with pytest.raises(RuntimeError, match="peer is gone"):
        group.allreduce([torch.ones(1)], _options(is_async=False))
    assert not group.has_open_ends and not group._tally.under_way


def test_a_call_that_waits_is_held_by_a_gate_that_is_not_open() -> None:
    real = _Real()
    group = _group(real)
    group._gate.hold({"0": 1})
    caller = threading.Thread(target=lambda: group.allreduce([torch.ones(1)], _options(is_async=False)))
    caller.start()
    while not group._gate.held_keys():
        assert caller.is_alive()
    assert (group._tally.entered, real.waits) == (1, [])
    group._gate.open()
    caller.join(_PATIENCE_S)
    assert (group._tally.entered, len(real.waits)) == (2, 1)


def test_threads_that_call_at_once_get_numbers_of_their_own() -> None:
    real, num_calls = _Real(), 200
    group = _group(real)
    callers = [
        threading.Thread(
            target=lambda is_async: [
                group.allreduce([torch.ones(1)], _options(is_async=is_async)).wait() for _ in range(num_calls)
            ],
            args=(number % 2 == 0,),
        )
        for number in range(4)
    ]
    for each in callers:
        each.start()
    for each in callers:
        each.join(_PATIENCE_S)
    assert (group._tally.entered, group._tally.under_way) == (1 + 4 * num_calls, {})


def test_a_group_that_the_program_has_destroyed_says_so_to_the_next_call() -> None:
    group = _group(_Real())
    group.shutdown()
    with pytest.raises(PeerError, match="the program has destroyed it"):
        group.allreduce([torch.ones(1)], _options(is_async=False))
    assert (group._tally.entered, group._tally.under_way) == (1, {})


def test_a_message_that_the_real_group_refuses_has_no_number_and_no_peer() -> None:
    """Later ones would be sent twice after a cut, and to a rank that is none nothing can be counted."""

    class Refuses(_Real):
        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
            if peer or not tensors[0].is_contiguous():
                raise ValueError("refused")
            return _NeverDone()

    group = _group(Refuses())
    for tensor, peer in ((torch.ones(2, 3).t(), 0), (torch.ones(1), 99)):
        with pytest.raises(ValueError, match="refused"):
            group.send([tensor], peer)
    group.send([torch.ones(1)], 0)
    assert [each.number for each in group._messages.open] == [1]
    sent: dict[int, int] = {}
    group.count_messages(sent, {})
    assert sent == {0: 0}


@pytest.mark.parametrize("is_async", [False, True])
def test_torch_finds_the_methods_of_a_group_from_c_and_waits_for_what_they_return(is_async: bool) -> None:
    """As DDP calls them: torch would take a builtin function in their place for its own."""
    real = _Real()
    work = ProcessGroup.allreduce(_group(real), [torch.ones(2)], _options(is_async=is_async))
    assert work.wait()
    assert len(real.waits) == 1


def test_a_barrier_of_torch_can_be_dropped_at_a_cut() -> None:
    """torch names its options, as of no other collective."""

    class Barrier(_Real):
        def barrier(self, opts: object) -> Any:
            return _NeverDone()

    group = _group(Barrier())
    group.barrier(opts=_options(is_async=False))
    assert [each.can_begin_anew for each in group._tally.under_way] == [True]


def test_works_that_nobody_asks_do_not_pile_up() -> None:
    group = _group(_Real())
    for _ in range(5):
        group.allreduce([torch.ones(1)], _options(is_async=True))
    assert len(group._tally.under_way) <= 1


def test_what_a_library_takes_for_the_backend_of_a_group_is_the_group() -> None:
    """Of the one beneath, which moves nothing, torch would take no timeout, and a collective would raise."""
    group = _group(_Real())
    backend = group._get_backend(torch.device("cpu"))
    assert backend.allreduce([torch.ones(1)], _options(is_async=False)) is ENDED
    assert not (backend.supports_splitting or backend.supports_tensor_alloc(torch.device("cpu")))


def test_a_destroyed_group_keeps_no_work_that_has_ended_and_that_nobody_asked() -> None:
    """As of a hook of DDP's that has looked at the future alone: the work holds connections, which no cut may find."""
    slow = _Slow()
    group = _group_with(slow)
    group.allreduce([torch.ones(1)], _options(is_async=True))
    slow.may_end.set()
    group.shutdown()
    assert not group._tally.under_way


def test_a_destroyed_group_lets_go_at_a_cut_of_what_has_not_ended_and_says_so_to_who_waits() -> None:
    group = _group_with(_Slow())
    work = group.allreduce([torch.ones(1)], _options(is_async=True))
    group.shutdown()
    assert group._tally.under_way
    assert group.forget(1.0)
    assert not group._tally.under_way
    with pytest.raises(RuntimeError, match="the program has destroyed it"):
        work.wait()


def test_a_barrier_that_names_who_did_not_come_is_not_counted_as_they_do_not_count_it_either() -> None:
    class Backend:
        def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
            if wait_all_ranks:
                raise RuntimeError("Rank 1 failed to pass monitoredBarrier in 100 ms")

    group = _group(_Real())
    group._backend = Backend()
    before = group._tally.entered
    with pytest.raises(RuntimeError, match="Rank 1 failed"):
        group.monitored_barrier(timedelta(seconds=0.1), wait_all_ranks=True)
    assert group._tally.entered == before
    group.monitored_barrier(timedelta(seconds=0.1))
    assert group._tally.entered == before + 1
    assert not group.has_open_ends


def test_what_was_called_in_inference_mode_begins_anew_in_it() -> None:
    group = _group_with(_Slow())
    with torch.inference_mode():
        tensor = torch.ones(2)
        group.allreduce([tensor], _options(is_async=True))
    real = _Real()

    def add(tensors: list[torch.Tensor], _: AllreduceOptions) -> Work:
        tensors[0].add_(1)
        return _Slow()

    real.allreduce = add  # type: ignore[method-assign]
    group._use(cast(ProcessGroup, real))
    group.begin_anew()
    assert tensor.tolist() == [2.0, 2.0]
