"""Remesh carries the state of a running distributed job from any mesh to any other.

Names are resolved at first use: ``import remesh.layout`` stays free of torch."""

import importlib
from typing import TYPE_CHECKING, Any

from remesh.errors import ConfigError, Error, FormatError, LayoutError, PeerError, PlanError, StorageError
from remesh.first_use import attribute_at_home

if TYPE_CHECKING:
    from remesh import checkpoint, dist_checkpointing, errors, layout, pipeline, retention, testbed  # noqa: F401
    from remesh.checkpoint.manager import Checkpoints
    from remesh.checkpoint.plain import latest_complete, load, save
    from remesh.elastic.api import elastic
    from remesh.elastic.mesh_policy import Memory, Template, make_template
    from remesh.elastic.training.job import Job
    from remesh.elastic.training.stream import Stream
    from remesh.layout.from_torch import Piece
    from remesh.reshard.api import reshard, reshard_async
    from remesh.reshard.faces import redistribute_across, reshard_tensor
    from remesh.reshard.refit import Refit
    from remesh.reshard.running.cache import Resharder
    from remesh.reshard.running.run import Moved
    from remesh.reshard.target import Target
    from remesh.reshard.windows import reshard_by_windows

    __version__: str

__all__ = [
    "Checkpoints",
    "ConfigError",
    "Error",
    "FormatError",
    "Job",
    "LayoutError",
    "Memory",
    "Moved",
    "PeerError",
    "Piece",
    "PlanError",
    "Refit",
    "Resharder",
    "StorageError",
    "Stream",
    "Target",
    "Template",
    "elastic",
    "latest_complete",
    "load",
    "make_template",
    "redistribute_across",
    "reshard",
    "reshard_async",
    "reshard_by_windows",
    "reshard_tensor",
    "save",
]

_HOMES = {
    "Checkpoints": "remesh.checkpoint.manager",
    "Job": "remesh.elastic.training.job",
    "Memory": "remesh.elastic.mesh_policy",
    "Moved": "remesh.reshard.running.run",
    "Piece": "remesh.layout.from_torch",
    "Refit": "remesh.reshard.refit",
    "Resharder": "remesh.reshard.running.cache",
    "Stream": "remesh.elastic.training.stream",
    "Target": "remesh.reshard.target",
    "Template": "remesh.elastic.mesh_policy",
    "latest_complete": "remesh.checkpoint.plain",
    "load": "remesh.checkpoint.plain",
    "make_template": "remesh.elastic.mesh_policy",
    "redistribute_across": "remesh.reshard.faces",
    "reshard_async": "remesh.reshard.api",
    "reshard_by_windows": "remesh.reshard.windows",
    "reshard_tensor": "remesh.reshard.faces",
    "save": "remesh.checkpoint.plain",
}
# Rooms answer to their name; ``reshard`` and ``elastic`` are packages that can be called (callable_package.py).
_ROOMS = frozenset(
    {
        *(
            "checkpoint",
            "cli",
            "comm",
            "dashboard",
            "dist_checkpointing",
            "elastic",
            "errors",
            "images",
            "integrations",
        ),
        *("layout", "linux", "mpi", "pipeline", "ranks", "reshard", "retention", "rounds", "testbed", "testing"),
        "torch_programs",
    }
)


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _installed_version()
        if name in _ROOMS:
            return importlib.import_module(f"remesh.{name}")
        return attribute_at_home("remesh", _HOMES, name)


def _installed_version() -> str:
    """The version of the installed package, from its git tag; a source tree that is not installed has none."""
    metadata = importlib.import_module("importlib.metadata")  # slow to load, and seldom asked
    try:
        return str(metadata.version("remesh"))
    except metadata.PackageNotFoundError:
        return "0.0.0+source"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
