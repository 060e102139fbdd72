"""The lower half on real processes: blocked ranks wake at once, the program's own sockets stay, groups grow again."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from remesh.elasticity.store.store_line import StoreLine
from remesh.groups.blame import is_network_error
from remesh.groups.lower import LowerHalf
from remesh.testbed.pool import DIED, RankPool

GROUP_TIMEOUT_S = 50.0
CONNECT_TIMEOUT_S = 300.0
"""Each of torch's connections asks the resolver for names, and one lost packet of its is five seconds."""
AXES = {"dp": 2, "tp": 2}


def _grow(folder: str, generation: int, rank: int, axes: dict[str, int]) -> LowerHalf:
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.destroy_process_group()
    lower = LowerHalf("gloo", "cpu", GROUP_TIMEOUT_S)
    lower.grow(dist.FileStore(f"{folder}/{generation}"), rank, axes)
    return lower


def _wait_for_rank_0(folder: str) -> None:
    while not Path(folder, "rank 0 goes on").exists():
        time.sleep(0.01)


def _go_on(folder: str) -> None:
    Path(folder, "rank 0 goes on").touch()


def _wake_a_rank_that_waits_for_a_living_neighbour(folder: str) -> tuple[bool, float]:
    """Rank 0 waits for rank 1, which is alive and never comes; another thread severs."""
    lower = _grow(folder, 1, 0, AXES)
    rank = dist.get_rank()
    if rank != 0:
        _wait_for_rank_0(folder)
        lower.shed()
        return True, 0.0
    threading.Timer(0.5, lower.sever).start()
    begun_s = time.monotonic()
    try:
        dist.recv(torch.zeros(1), src=1)
    except RuntimeError as error:
        woken = is_network_error(error)
    _go_on(folder)
    lower.shed()
    return woken, time.monotonic() - begun_s


def test_severing_wakes_a_rank_that_waits_for_a_living_neighbour(ranks: RankPool, tmp_path: Path) -> None:
    woken, waited_s = ranks.run(_wake_a_rank_that_waits_for_a_living_neighbour, 4, (str(tmp_path),))[0]
    assert woken
    # Not a matter of speed: without the cut it is the group's timeout.
    assert waited_s < GROUP_TIMEOUT_S / 2


def _sever_once_it_waits(lower: LowerHalf, host: dist.TCPStore) -> None:
    """Rank 0 puts its backend and its address into the store, then waits for those of rank 1."""
    while host.num_keys() < 2:
        time.sleep(0.01)
    lower.sever()


def _wake_a_rank_that_waits_in_the_store() -> tuple[bool, bool, float]:
    """Rank 1 of the new groups never comes; another thread severs. Then the store serves a new connection."""
    dist.destroy_process_group()
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line = StoreLine(f"127.0.0.1:{host.port}", patience_s=CONNECT_TIMEOUT_S, timeout_s=GROUP_TIMEOUT_S)
    lower = LowerHalf("gloo", "cpu", GROUP_TIMEOUT_S)
    threading.Thread(target=_sever_once_it_waits, args=(lower, host), daemon=True).start()
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        lower.grow(dist.PrefixStore("1", line.store), 0, {"dp": 2}, wake=line.cut)
    waited_s = time.monotonic() - begun_s
    lower.shed()
    again = StoreLine(line.endpoint, patience_s=CONNECT_TIMEOUT_S, timeout_s=GROUP_TIMEOUT_S)
    lower.grow(dist.PrefixStore("2", again.store), 0, {"dp": 1}, wake=again.cut)
    lower.shed()
    host.set("still", "here")
    return is_network_error(raised.value), line.is_cut and not again.is_cut, waited_s


def test_severing_wakes_a_rank_that_waits_in_the_store_for_one_that_never_comes(ranks: RankPool) -> None:
    """Else it waits as long as its group may take, and its agent kills it meanwhile, with the state that it holds."""
    ((is_networks, is_cut, waited_s),) = ranks.run(_wake_a_rank_that_waits_in_the_store, 1)
    assert is_networks and is_cut
    assert waited_s < GROUP_TIMEOUT_S / 2


def _keep_a_socket_of_the_program(folder: str) -> bytes:
    near, far = socket.socketpair()
    lower = _grow(folder, 1, 0, AXES)
    dist.barrier(lower.control)
    late_near, late_far = socket.socketpair()
    lower.sever()
    near.sendall(b"still ")
    late_near.sendall(b"here")
    received = far.recv(100) + late_far.recv(100)
    lower.shed()
    for one in (near, far, late_near, late_far):
        one.close()
    return received


def test_sockets_of_the_program_survive_opened_before_or_after_the_groups(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_keep_a_socket_of_the_program, 4, (str(tmp_path),)) == [b"still here"] * 4


def _go_on_without_the_dead(folder: str) -> tuple[float, list[int]]:
    rank = dist.get_rank()
    lower = _grow(folder, 1, 0, AXES)
    try:
        while True:
            dist.all_reduce(torch.ones(1))
            if rank == 3:  # all have grown, or they would not be in the sum
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        assert is_network_error(error)
    lower.sever()
    lower.shed()
    again = _grow(folder, 2, rank, {"dp": 3})
    total = torch.ones(1)
    dist.all_reduce(total)
    assert again.mesh is not None
    shape = list(again.mesh.shape)
    again.shed()
    return total.item(), shape


def test_survivors_of_a_killed_rank_form_new_groups_in_the_same_processes(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(_go_on_without_the_dead, 4, (str(tmp_path),), dying=(3,))
    assert results == [(3.0, [3])] * 3 + [DIED]


def _wait_on_a_mesh_axis(folder: str) -> None:
    """Rank 1 never enters a collective of the mesh's own group."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    lower = LowerHalf("gloo", "cpu", 30.0)  # in which both must have come to the meeting
    lower.grow(dist.FileStore(f"{folder}/1"), rank, {"tp": 2})
    assert lower.mesh is not None
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=lower.mesh["tp"].get_group())
        _go_on(folder)
    else:
        _wait_for_rank_0(folder)
    lower.shed()


@pytest.mark.slow
def test_collectives_on_mesh_axes_are_bounded_by_the_jobs_timeout(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_wait_on_a_mesh_axis, 2, (str(tmp_path),))


def _grow_against_a_missing_member(folder: str) -> float:
    """Rank 1 misses the first meeting, as if it had died and come back; at the second all are there."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    lower = LowerHalf("gloo", "cpu", 2.0)
    if rank == 0:
        with pytest.raises(RuntimeError):
            lower.grow(dist.FileStore(f"{folder}/1"), rank, {"dp": 2})
        lower.shed()
    lower = _grow(folder, 2, rank, {"dp": 2})
    total = torch.ones(1)
    dist.all_reduce(total)
    lower.shed()
    return total.item()


def test_a_member_that_never_comes_costs_a_bounded_wait_and_no_later_meeting(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_grow_against_a_missing_member, 2, (str(tmp_path),)) == [2.0, 2.0]


def _build_on_pretended_groups_then_train_on_real_ones(folder: str) -> tuple[list[float], bool]:
    """A tensor-parallel model is built without a word to anybody; its mesh is good on the groups that come after."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    lower = LowerHalf("gloo", "cpu", GROUP_TIMEOUT_S)
    lower.shed()
    lower.pretend(rank, AXES)
    assert lower.mesh is not None
    mesh, kept = lower.mesh, lower.mesh["tp"].get_group()
    weight = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)])
    lower.shed()
    lower.grow(dist.FileStore(f"{folder}/1"), rank, AXES)
    with torch.no_grad():
        weight.to_local().fill_(float(rank))
    whole = weight.full_tensor()[:, 0].tolist()
    try:
        dist.all_reduce(torch.ones(1), group=kept)
        refused = False
    except (RuntimeError, ValueError):
        refused = True
    lower.shed()
    return whole, refused


def test_model_built_on_pretended_groups_is_good_on_real_ones(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_build_on_pretended_groups_then_train_on_real_ones, 4, (str(tmp_path),))
    assert [whole for whole, _ in found] == [[0.0, 0.0, 1.0, 1.0]] * 2 + [[2.0, 2.0, 3.0, 3.0]] * 2
    assert all(refused for _, refused in found), "a group that pretended must not be used in silence"
