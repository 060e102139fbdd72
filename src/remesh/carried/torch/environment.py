"""Environment and command of a rank's program, as torchrun would set them."""

from __future__ import annotations

import sys
from typing import Final

from remesh.carried.hosts.host_list import RankSlot
from remesh.carried.hosts.process_ids import find_process_id
from remesh.carried.images.form.kinds import Command
from remesh.carried.rounds.job_folder import JobSpec
from remesh.wire.token import Token

_MODULE = "remesh.carried.torch.program_start"
_DEFAULTS: Final = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
"""Defaults that a user may change. torch's own store would be at that address; none is, and nothing connects to it."""


def program_command(spec: JobSpec, slot: RankSlot, token: Token) -> Command:
    """How the program of a rank is started; ``token`` is the job's."""
    argv = (sys.executable, "-m", _MODULE, *spec.argv)
    pid = find_process_id(slot.rank, spec.num_ranks, token)
    return Command(argv, program_environment(spec, slot), spec.folder, pid=pid)


def program_environment(spec: JobSpec, slot: RankSlot) -> dict[str, str]:
    """The user's environment, and the variables of torchrun for a rank's place among its hosts."""
    size = str(spec.num_ranks)
    found = {
        **_DEFAULTS,
        **spec.environment,
        "RANK": str(slot.rank),
        "LOCAL_RANK": str(slot.local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(slot.num_local),
        "GROUP_RANK": str(slot.host_index),
        "GROUP_WORLD_SIZE": str(slot.num_hosts),
        "ROLE_RANK": str(slot.rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if slot.num_local > 1:
        # torchrun sets it where the user has not: ranks of one host share its cores.
        found.setdefault("OMP_NUM_THREADS", "1")
    return found
