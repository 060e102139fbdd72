"""What NCCL needs of its members is told on all ranks before anything moves; here groups only call themselves so."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import remesh
from remesh.comm import gather
from remesh.comm.gather import all_gather_json, group_device
from remesh.device import nccl
from remesh.device.nccl import NcclMember, agree_on_members, check_members
from remesh.device.nccl_settings import let_groups_be_aborted
from remesh.foundation.errors import ConfigError, PeerError
from remesh.groups import lower
from remesh.groups.lower import LowerHalf
from remesh.testbed.pool import RankPool

A, B = NcclMember("h", "GPU-a", False), NcclMember("h", "GPU-b", False)


@given(st.lists(st.tuples(st.sampled_from("hi"), st.sampled_from("abcd")), max_size=6))
def test_members_need_a_device_each(places: list[tuple[str, str]]) -> None:
    members = [NcclMember(host, device, False) for host, device in places]
    if len(set(places)) == len(places):
        check_members(members)
    else:
        with pytest.raises(ConfigError, match="share device"):
            check_members(members)


def test_who_has_not_chosen_a_device_is_told_how() -> None:
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 of 3 share device GPU-a .* without device_id.*set_device"):
        check_members([A, B, A])


def settings_with(handling: str | None) -> dict[str, str]:
    """Those of an elastic job, with another value of the one that says what becomes of the process at an error."""
    settings = {} if handling is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": handling}
    let_groups_be_aborted(settings)
    return settings


@pytest.mark.parametrize(("handling", "is_fine"), [(None, True), ("2", True), ("0", True), ("1", False), ("3", False)])
def test_groups_are_made_again_only_by_who_outlives_their_errors(handling: str | None, is_fine: bool) -> None:
    members = [A, NcclMember("h", "GPU-b", False, must_outlive=True, settings=settings_with(handling))]
    if is_fine:
        check_members(members)
        return
    with pytest.raises(ConfigError, match=f"on rank 1 of 2 TORCH_NCCL_ASYNC_ERROR_HANDLING is '{handling}'.*unset it"):
        check_members(members)


def test_what_a_user_has_said_of_errors_stays() -> None:
    assert settings_with(None)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert settings_with("0")["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_a_member_that_never_comes_is_told_after_the_timeout() -> None:
    with pytest.raises(PeerError, match="rank 1 of 2 received nothing from the others for 0 s"):
        agree_on_members(dist.HashStore(), 1, 2, B, timedelta(milliseconds=10))


def call_itself_nccl(what: str) -> list[str]:
    """Both ranks have not chosen a device. Nothing may be sent: no such device is there, and touching it would fail."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(nccl, "member_here", lambda device_id, **more: A)
        patch.setattr(gather, "member_here", lambda device_id, **more: A)
        assert group_device().type == "cuda"
        weight = torch.ones(4)
        calls = {
            "gather": lambda: all_gather_json(1),
            "reshard": lambda: remesh.reshard({"w": weight}, {"w": torch.zeros(4)}),
            "save": lambda: remesh.save({"w": weight}, "/nowhere/to/be/found"),
        }
        for _ in range(2):
            with pytest.raises(ConfigError) as raised:
                calls[what]()
            told.append(str(raised.value))
    return told


@pytest.mark.parametrize("what", ["gather", "reshard", "save"])
def test_ranks_that_share_a_device_are_told_on_all_ranks_whatever_they_call(ranks: RankPool, what: str) -> None:
    told = ranks.run(call_itself_nccl, 2, (what,))
    assert len({text for texts in told for text in texts}) == 1
    assert "ranks 0 and 1 of 2 share device GPU-a" in told[0][0]


def grow_over_nccl(folder: str) -> str:
    rank = dist.get_rank()
    dist.destroy_process_group()
    here = NcclMember("h", f"GPU-{rank}", False, must_outlive=True, settings=settings_with("3" if rank else None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "member_here", lambda device_id, **more: here)
        half = LowerHalf("nccl", "cuda", 30.0)
        with pytest.raises(ConfigError) as raised:
            half.grow(dist.FileStore(f"{folder}/store"), rank, {"dp": 2})
    assert not dist.is_initialized()
    return str(raised.value)


def test_a_mesh_over_nccl_is_refused_on_all_ranks_before_its_groups_are_made(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    told = ranks.run(grow_over_nccl, 2, (str(tmp_path_factory.mktemp("nccl")),))
    assert told[0] == told[1]
    assert "on rank 1 of 2 TORCH_NCCL_ASYNC_ERROR_HANDLING is '3'" in told[0]
