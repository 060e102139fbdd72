"""What does a program find in its environment? What torchrun would have put there."""

from __future__ import annotations

import sys

from remesh.images.kinds import Command
from remesh.rounds.job_folder import JobSpec

_MODULE = "remesh.torch_programs.program"
_ADDRESS, _PORT = "127.0.0.1", 29500
"""Where torch would look for its store; nobody is there, and nobody looks."""


def program_command(spec: JobSpec, rank: int) -> Command:
    """How the program of a rank is started."""
    return Command((sys.executable, "-m", _MODULE, *spec.argv), program_environment(spec, rank), spec.folder)


def program_environment(spec: JobSpec, rank: int) -> dict[str, str]:
    """The user's environment, and the variables of torchrun for one node."""
    size = str(spec.num_ranks)
    found = {
        **spec.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(_PORT),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if spec.num_ranks > 1:
        # torchrun sets it where the user has not: ranks of one host share its cores.
        found.setdefault("OMP_NUM_THREADS", "1")
    return found
