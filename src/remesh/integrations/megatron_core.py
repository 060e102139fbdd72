"""Replacement of Megatron Core's ``dist_checkpointing`` by Remesh, for Megatron-LM, Megatron-Bridge, NeMo.

    from remesh.integrations.megatron_core import put_in_place; put_in_place()    # the first line of a script

Each module of Megatron Core's has a module with the same names in `remesh.dist_checkpointing`. Python finds that one
where Megatron's is imported, so whatever builds sharded tensors, wraps strategies or saves has one set of classes.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from remesh.foundation.errors import ConfigError
from remesh.integrations.host_programs import check_host

_THEIRS = "megatron.core.dist_checkpointing"
_OURS = "remesh.dist_checkpointing"


def put_in_place() -> None:
    """Let every import of Megatron's checkpoints find Remesh's; called before anything of Megatron is imported.

    A second call does no harm. Raises `ConfigError` if Megatron Core is missing, too old, or has imported its own.
    """
    check_host("megatron-core", (0, 12))
    found = sys.modules.get(_THEIRS)
    if found is not None and found.__name__ != _OURS:
        raise ConfigError(
            f"putting Remesh in the place of {_THEIRS}: it has been imported already, and what imported it has its "
            "classes; call put_in_place in the first line of the script, before any import of Megatron"
        )
    ours = importlib.import_module(_OURS)
    names = [_OURS, *(one.name for one in pkgutil.walk_packages(ours.__path__, f"{_OURS}."))]
    sys.modules.update({_THEIRS + name.removeprefix(_OURS): importlib.import_module(name) for name in names})
