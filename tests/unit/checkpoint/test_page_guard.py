"""A copy by protected pages has the values of the call, whatever is changed after it, and holds nobody up for ever."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from remesh import dist_checkpointing
from remesh.checkpoint.background.page_copier import BLOCK_BYTES, Lost, _CopyJob
from remesh.checkpoint.background.page_guard import LEAST_BYTES, PageCopier, Refused, select
from remesh.checkpoint.background.staging import StagingBuffers
from remesh.checkpoint.errors import CheckpointingException
from remesh.checkpoint.storage.integrity import verify
from remesh.dist_checkpointing import ShardedObject, ShardedTensor
from remesh.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    large = [torch.randn(number * 1000 + 70_000, generator=generator) for number in range(1, 40, 6)]
    return [*large, torch.zeros(1 << 20), torch.randn(600, 500, generator=generator).t(), torch.ones(3), torch.empty(0)]


@pytest.fixture
def staging() -> Iterator[StagingBuffers]:
    staging = StagingBuffers(may_guard=True)
    first = staging.copy([torch.ones(LEAST_BYTES)])
    if first.guarded is None:
        pytest.skip("userfaultfd is not allowed here (Linux 6.4; root or vm.unprivileged_userfaultfd)")
    first.wait()
    yield staging


def _process(staging: StagingBuffers) -> int:
    assert staging._copier is not None and staging._copier._process is not None
    ending = staging._copier._process._ending.peek()
    assert ending is not None
    pid: int = ending[2][1].pid
    return pid


@pytest.mark.procs
def test_values_are_those_of_the_call(staging: StagingBuffers) -> None:
    values = tensors()
    for number in range(3):
        wanted = [value.clone() for value in values]
        copies = staging.copy(values)
        assert copies.guarded is not None
        for value in reversed(values):
            value.add_(number + 1)
        copies = copies.wait()
        assert all(torch.equal(copy, value) for copy, value in zip(copies.tensors, wanted, strict=True))
        staging.give_back(copies)


@pytest.mark.procs
def test_a_program_may_go_on_writing_after_the_copy(staging: StagingBuffers) -> None:
    values = tensors()
    copies = staging.copy(values).wait()
    assert all(torch.equal(value.fill_(7), torch.full_like(value, 7)) for value in values)
    assert not any((copy == 7).any() for copy in copies.tensors)


@pytest.mark.procs
def test_copies_that_nobody_waits_for_do_not_hold_up_the_next(staging: StagingBuffers) -> None:
    for _ in range(3):
        assert staging.copy(tensors()).guarded is not None
    copies = staging.copy(wanted := tensors()).wait()
    assert all(torch.equal(copy, value) for copy, value in zip(copies.tensors, wanted, strict=True))


def test_only_large_pieces_of_private_memory_are_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(LEAST_BYTES))
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, LEAST_BYTES)
    private_file = torch.from_file(str(tmp_path / "file"), shared=False, size=LEAST_BYTES, dtype=torch.uint8)
    shared = torch.frombuffer(mmap.mmap(descriptor, LEAST_BYTES), dtype=torch.uint8)
    os.close(descriptor)
    whole = torch.ones(LEAST_BYTES, dtype=torch.uint8)
    turned = torch.ones(1000, 300).t()
    of_torch = torch.ones(LEAST_BYTES).share_memory_()
    assert select([private_file, shared, whole, turned, of_torch, whole[1:], torch.ones(LEAST_BYTES)]) == [2, 6]


def test_memory_that_goes_before_it_is_copied_fails_the_copy() -> None:
    copy = os.memfd_create("copy")
    os.ftruncate(copy, 1 << 20)
    start = 5 * BLOCK_BYTES + 4096
    job = _CopyJob(os.getpid(), -1, copy, [[start, start + 8192]], [[start + 64, 4096, 0]])
    job._cut()
    job._lose(start + 4160, start + 8192)  # of the page, but not of the tensor
    with pytest.raises(Lost, match="given back"):
        job._lose(start, start + 4096)
    job._pending.clear()
    job._lose(start, start + 4096)
    os.close(copy)


@pytest.mark.procs
def test_a_killed_copier_holds_up_nobody_and_the_next_copy_gets_another(staging: StagingBuffers) -> None:
    values = [torch.zeros(4 << 20) for _ in range(4)]
    copies = staging.copy(values)
    os.kill(_process(staging), signal.SIGKILL)
    for value in values:
        value.fill_(1)  # is not held up
    try:
        assert all(not copy.any() for copy in copies.wait().tensors)
    except CheckpointingException as raised:
        assert "the save does not exist" in str(raised)
    again = staging.copy(values)
    assert again.guarded is not None
    assert all(bool(copy.all()) for copy in again.wait().tensors)


@pytest.mark.procs
def test_a_fork_waits_for_no_lock_and_has_a_copier_of_its_own(staging: StagingBuffers) -> None:
    copier, values = staging._copier, [torch.zeros(1 << 20)]
    assert copier is not None
    begun = staging.copy(values)
    with copier._lock:  # held by a thread that the fork has not
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # a fork that waits for ever ends there
            torch.set_num_threads(1)  # those of OpenMP are gone
            with pytest.raises(CheckpointingException, match="a fork of the one that asked"):
                begun.wait()
            values[0].fill_(2)
            own = staging.copy(values)
            assert own.guarded is not None and bool(own.wait().tensors[0].eq(2).all())
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not begun.wait().tensors[0].any(), "the parent's copy is made, and by the process that it had"
    again = staging.copy([values[0].fill_(3)])
    assert bool(again.wait().tensors[0].eq(3).all())


def test_where_the_system_does_not_allow_it_tensors_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Refused("not here")

    monkeypatch.setattr(PageCopier, "copy", refuse)
    copies = StagingBuffers(may_guard=True).copy(wanted := tensors())
    assert copies.guarded is None
    assert all(torch.equal(copy, value) for copy, value in zip(copies.tensors, wanted, strict=True))


@pytest.mark.procs
def test_the_files_are_those_of_a_save_in_the_foreground(staging: StagingBuffers, tmp_path: Path) -> None:
    def save(directory: Path, change: Callable[[torch.Tensor], object] | None) -> None:
        directory.mkdir()
        values = tensors()
        sharded = {str(at): ShardedTensor.from_rank_offsets(str(at), value) for at, value in enumerate(values)}
        state = {**sharded, "o": ShardedObject("o", [1], (1,), (0,)), "step": 3}
        strategy = TorchDistSaveShardedStrategy(snapshots="guard" if change else "copy")
        request = dist_checkpointing.save(state, directory, strategy, async_sharded_save=change is not None)
        if change is not None and request is not None:
            for value in values:
                change(value)
            request.execute_sync()

    save(tmp_path / "behind", lambda value: value.fill_(7))
    save(tmp_path / "plain", None)
    names = ("__0_0.distcp", "common.pt")
    assert all((tmp_path / "behind" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes() for name in names)
    assert list(verify(tmp_path / "behind"))


@pytest.mark.parametrize("snapshots", ["fork", "spoon"])
def test_an_unknown_way_to_take_snapshots_is_refused(snapshots: str) -> None:
    with pytest.raises(CheckpointingException, match=f"snapshots is '{snapshots}', expected 'copy' or 'guard'"):
        TorchDistSaveShardedStrategy(snapshots=snapshots)
