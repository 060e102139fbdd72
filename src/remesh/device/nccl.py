"""Checks that ranks can communicate over NCCL, exchanged through a store before anything moves.

NCCL itself would answer late, on some ranks, or not at all: two ranks on one device wait for each other, and settings
of torch let a process end when a neighbour is gone. So every member reports what it has, the first one judges, and all
receive the same verdict:

1. A device for each rank. Ranks of a host that use one device have mostly not chosen any: then all have the first.
2. Where groups are to be aborted and made again (`remesh.groups.lower`), a member outlives the errors of its groups
   (`remesh.device.nccl_settings`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from remesh.device.nccl_settings import settings_here, why_it_would_end
from remesh.foundation.errors import ConfigError, PeerError


@dataclass(frozen=True, slots=True)
class NcclMember:
    """What one rank reports of its NCCL."""

    host: str
    device: str
    """What no other device of the host has, too, however the process numbers them."""
    has_device_id: bool
    """Whether the group was made with one."""
    must_outlive: bool = False
    """Whether its groups are aborted and made again."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings of torch that decide whether it outlives an abort."""


def member_here(device_id: torch.device | None, *, must_outlive: bool = False) -> NcclMember:
    """This process, with the device that its group was made with, or that is in use."""
    number = torch.cuda.current_device() if device_id is None else device_id
    return NcclMember(
        socket.gethostname(),
        str(torch.cuda.get_device_properties(number).uuid),
        device_id is not None,
        must_outlive,
        settings_here(),
    )


def check_members(members: Sequence[NcclMember]) -> None:
    """Raise `ConfigError` for members that cannot talk over NCCL; pure."""
    first_with: dict[tuple[str, str], int] = {}
    for rank, member in enumerate(members):
        other = first_with.setdefault((member.host, member.device), rank)
        if other != rank:
            how = "of device_id" if member.has_device_id else "in use, for the group was made without device_id"
            raise ConfigError(
                f"talking over NCCL: ranks {other} and {rank} of {len(members)} share device {member.device} of host "
                f"{member.host} ({how}), expected a device for each; call torch.cuda.set_device(LOCAL_RANK) first, "
                "give init_process_group device_id, or use gloo, which lets ranks share one"
            )
        if member.must_outlive and (ends := why_it_would_end(member.settings)) is not None:
            raise ConfigError(f"talking over NCCL: on rank {rank} of {len(members)} {ends}")


def agree_on_members(store: dist.Store, rank: int, world_size: int, mine: NcclMember, timeout: timedelta) -> None:
    """Raise on all ranks alike what `check_members` raises. Called by every rank, once for each of their groups.

    `PeerError` when some rank has not come before the timeout.
    """
    meeting = (store.add("remesh-nccl/came", 1) - 1) // world_size  # an earlier group may have had the same store
    keys = [f"remesh-nccl/{meeting}/{each}" for each in range(world_size)]
    verdict_key = f"remesh-nccl/{meeting}/verdict"
    store.set(keys[rank], json.dumps(asdict(mine)))
    try:
        if rank == 0:
            store.wait(keys, timeout)
            store.set(verdict_key, _judge([json.loads(store.get(key)) for key in keys]))
        store.wait([verdict_key], timeout)
        verdict = store.get(verdict_key).decode()
    except RuntimeError as raised:
        raise PeerError(
            f"talking over NCCL: rank {rank} of {world_size} received nothing from the others for "
            f"{timeout.total_seconds():.0f} s, expected all of them; see what became of them, and meet again"
        ) from raised
    if verdict:
        raise ConfigError(verdict)


def _judge(members: Sequence[Mapping[str, object]]) -> str:
    try:
        check_members([NcclMember(**each) for each in members])  # type: ignore[arg-type]
    except ConfigError as raised:
        return str(raised)
    return ""
