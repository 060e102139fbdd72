"""A group over NCCL: what the device has queued has ended when it says so, and blocks are made at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, ProcessGroup, Work, distributed_c10d

from remesh.carried.torch.backends import post_batch
from remesh.carried.torch.cut import GroupsAtCut
from remesh.carried.torch.gate import Gate
from remesh.carried.torch.groups import CarriedGroup, GroupPlace, Groups, Recipe
from remesh.carried.torch.works import ENDED
from remesh.foundation.errors import ConfigError

_DEVICE: Final = torch.device("cpu")


class _Queued(Work):
    """What NCCL gives: a wait returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done, self.num_waits = False, 0

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.num_waits += 1
        return True

    def is_completed(self) -> bool:
        return self.is_done

    def get_future(self) -> Any:
        raise RuntimeError("none")


class _BelievedNccl:
    """Queues on a device that is as slow as the test likes, and is as strict as NCCL with blocks and with works."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.queued: list[tuple[str, ...]] = []
        """What was queued at a time, by name: a block is one."""
        self.works: list[_Queued] = []
        self.is_aborted = self.is_shut_down = False
        self._open: list[str] | None = None

    def _queue(self, name: str, *, gives_work: bool = True) -> Any:
        if self._open is not None:
            self._open.append(name)
            return None
        self.queued.append((name,))
        self.works.append(_Queued())
        return self.works[-1] if gives_work else None

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions) -> Any:
        return self._queue("allreduce", gives_work=options.asyncOp)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if not tensors:
            raise ValueError("nothing to send")
        return self._queue(f"send {peer}")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._queue(f"recv {peer}")

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._open is None, "a block within a block"
        self._open = []

    def _end_coalescing(self, device: torch.device) -> Any:
        names, self._open = self._open, None
        assert names is not None, "no block"
        if not names:
            return None
        self.queued.append(tuple(names))
        self.works.append(_Queued())
        return self.works[-1]

    def abort(self) -> None:
        self.is_aborted = True

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture(autouse=True)
def _no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class _Carried(CarriedGroup):
    """Made of a new real group each time."""

    def build(self, store: object) -> None:
        self.nccl = _BelievedNccl()
        self._use(cast(ProcessGroup, self.nccl), self.nccl)


@pytest.fixture
def groups() -> Groups:
    return Groups(Gate())


@pytest.fixture
def group(groups: Groups) -> _Carried:
    recipe = Recipe("nccl", ProcessGroup.BackendType.NCCL, "cuda", lambda _: None)
    made = _Carried(groups.gate, GroupPlace("0", (0, 1), 0), recipe, cast(Any, None))
    groups.all.append(made)
    groups.members["0"] = (0, 1)
    return made


class _Link:
    """The store's line, which nobody needs here."""

    def drop(self) -> None:
        pass


@pytest.fixture
def cut(groups: Groups) -> GroupsAtCut:
    return GroupsAtCut(groups, cast(Any, _Link()), 0, 2)


def close(groups: Groups) -> None:
    groups.gate.hold({"0": 100})
    groups.gate.close()


def all_reduce(group: CarriedGroup, *, is_async: bool) -> Work:
    options = AllreduceOptions()
    options.asyncOp = is_async
    return cast(Work, group.allreduce([torch.ones(1)], options))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_collective_that_was_waited_for_has_to_end_on_the_device_before_a_cut(
    group: _Carried, cut: GroupsAtCut, is_async: bool
) -> None:
    work = all_reduce(group, is_async=is_async)
    assert work.wait()
    assert (work is ENDED) is not is_async
    assert not cut.describe().quiet
    group.nccl.works[0].is_done = True
    status = cut.describe()
    assert status.quiet and not group.has_open_ends
    assert dict(status.standings)["0"].reached == 2  # the making of the group is the first one


def test_a_call_that_waits_itself_has_the_host_wait_for_nothing(group: _Carried) -> None:
    for _ in range(3):
        all_reduce(group, is_async=False)
    assert [work.num_waits for work in group.nccl.works] == [1, 1, 1]
    for work in group.nccl.works:
        work.is_done = True
    all_reduce(group, is_async=False)
    assert len(group._tally.under_way) == 1  # what has ended is not kept


def test_a_message_counts_once_the_device_has_ended_it(group: _Carried, cut: GroupsAtCut) -> None:
    work = group.send([torch.ones(1)], 1)
    assert cut.describe().sent == ()
    assert cut.describe().quiet, "it can be posted again"
    assert work.wait() and not work.is_completed()
    assert cut.describe().sent == () and not cut.describe().quiet, "the program goes on as if it had ended"
    group.nccl.works[0].is_done = True
    status = cut.describe()
    assert status.sent == ((1, 1),) and status.quiet and work.is_completed()


def exchange(group: CarriedGroup, num: int = 1) -> list[Any]:
    """A batch of messages as the program posts it, to rank 1 and from it."""
    calls = [dist.isend, dist.irecv] * num
    ops = [SimpleNamespace(op=op, tensor=torch.ones(1), group=group, tag=0, group_peer=1) for op in calls]

    def one_by_one(ops: list[Any]) -> list[Any]:
        for op in ops:
            if op.op is dist.isend:
                group.send([op.tensor], op.group_peer, op.tag)
            else:
                group.recv([op.tensor], op.group_peer, op.tag)
        return []

    return post_batch(distributed_c10d, one_by_one, ops)


def test_a_batch_of_messages_is_one_block(group: _Carried, cut: GroupsAtCut) -> None:
    (work,) = exchange(group)
    assert group.nccl.queued == [("send 1", "recv 1")]
    assert not work.is_completed()
    work.wait()
    assert not cut.describe().quiet
    group.nccl.works[0].is_done = True
    status = cut.describe()
    assert work.is_completed() and status.quiet
    assert (status.sent, status.received) == (((1, 1),), ((1, 1),))


def test_a_batch_that_was_cut_off_is_posted_again_as_a_block(group: _Carried, groups: Groups, cut: GroupsAtCut) -> None:
    first, alone, second = exchange(group)[0], group.send([torch.ones(1)], 1), exchange(group, 2)[0]
    close(groups)
    assert cut.describe().quiet
    before = group.nccl
    assert cut.shed() == ""
    assert before.is_aborted
    group.build(None)
    group.post_again(lambda peer: [])
    assert group.nccl.queued == before.queued == [("send 1", "recv 1"), ("send 1",), ("send 1", "recv 1") * 2]
    groups.gate.open()
    for work, real in zip((first, alone, second), group.nccl.works, strict=True):
        assert not work.is_completed()
        work.wait()
        real.is_done = True
        assert work.is_completed() and real.num_waits
    assert not any(work.num_waits for work in before.works)


def test_what_the_others_have_received_of_a_block_is_not_sent_again(
    group: _Carried, groups: Groups, cut: GroupsAtCut
) -> None:
    exchange(group)
    close(groups)
    assert cut.shed() == ""
    group.build(None)
    group.post_again(lambda peer: [[0, 0, 1]])
    assert group.nccl.queued == [("recv 1",)]


def test_a_block_of_collectives_counts_once_and_is_queued_at_its_end(group: _Carried, cut: GroupsAtCut) -> None:
    group._start_coalescing(_DEVICE)
    assert all_reduce(group, is_async=False) is ENDED and all_reduce(group, is_async=True) is ENDED
    assert not group.nccl.queued and cut.describe().quiet
    work = group._end_coalescing(_DEVICE)
    assert group.nccl.queued == [("allreduce", "allreduce")]
    assert work.wait() and not cut.describe().quiet
    group.nccl.works[0].is_done = True
    assert dict(cut.describe().standings)["0"].reached == 2


def test_a_block_of_nothing_is_nothing(group: _Carried) -> None:
    group._start_coalescing(_DEVICE)
    assert group._end_coalescing(_DEVICE) is None
    assert not group.nccl.queued


def test_a_block_of_both_kinds_is_refused_before_anything_is_queued(group: _Carried) -> None:
    group._start_coalescing(_DEVICE)
    all_reduce(group, is_async=True)
    group.send([torch.ones(1)], 1)
    with pytest.raises(ConfigError, match="1 collectives and 1 messages, expected one kind"):
        group._end_coalescing(_DEVICE)
    assert not group.nccl.queued
    exchange(group)
    assert group.nccl.queued == [("send 1", "recv 1")]


def test_a_batch_that_is_refused_leaves_no_block_open(group: _Carried) -> None:
    def refuse(_: list[Any]) -> list[Any]:
        group.send([torch.ones(1)], 1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        post_batch(distributed_c10d, refuse, [SimpleNamespace(group=group, tensor=torch.ones(1))])
    exchange(group)
    assert group.nccl.queued == [("send 1", "recv 1")]


def test_a_batch_of_something_else_is_refused_in_torchs_words() -> None:
    with pytest.raises(ValueError, match="Invalid"):
        distributed_c10d.batch_isend_irecv([1, 2])
    with pytest.raises(ValueError, match="Invalid"):
        post_batch(distributed_c10d, distributed_c10d.batch_isend_irecv, cast(Any, [1, 2]))


def test_what_the_real_group_refuses_in_a_block_leaves_none_open(group: _Carried, cut: GroupsAtCut) -> None:
    group._start_coalescing(_DEVICE)
    group.send([], 1)
    with pytest.raises(ValueError, match="nothing to send"):
        group._end_coalescing(_DEVICE)
    exchange(group)
    assert group.nccl.queued == [("send 1", "recv 1")]
    assert [stream.posted for stream in group._messages.sent.values()] == [1]


def test_a_group_that_the_program_destroys_ends_its_communicators(group: _Carried) -> None:
    group.shutdown()
    assert group.nccl.is_shut_down and not group.is_live


def test_a_group_without_blocks_refuses_them_as_torch_does(groups: Groups) -> None:
    class Real:
        def _start_coalescing(self, device: torch.device) -> None:
            raise RuntimeError("Backend gloo does not implement startCoalescing")

        def send(self, *_: object) -> Work:
            return _Queued()

        recv = send

    class Carried(CarriedGroup):
        def build(self, store: object) -> None:
            self._use(cast(ProcessGroup, Real()), Real())

    recipe = Recipe("gloo", ProcessGroup.BackendType.GLOO, "cpu", lambda _: None)
    group = Carried(groups.gate, GroupPlace("1", (0, 1), 0), recipe, cast(Any, None))
    with pytest.raises(RuntimeError, match="gloo does not implement startCoalescing"):
        group._start_coalescing(_DEVICE)
    assert exchange(group) == [] and len(group._messages.open) == 2


def test_communicators_that_cannot_be_aborted_are_told(
    group: _Carried, cut: GroupsAtCut, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("the device is lost")

    abort: Callable[[], None] = refuse
    monkeypatch.setattr(group.nccl, "abort", abort)
    close(groups)
    assert "the device is lost" in cut.shed()
