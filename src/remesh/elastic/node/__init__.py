"""What runs on each node: its agent, with the worker processes, their links and the store as the agent sees them."""

from typing import TYPE_CHECKING, Any

from remesh.first_use import attribute_at_home

if TYPE_CHECKING:
    from remesh.elastic.node.agent import run_agent

__all__ = ["run_agent"]

_HOMES = {"run_agent": "remesh.elastic.node.agent"}
"""Most of this package; a launcher of scripts that do not use Remesh needs none of it."""


def __getattr__(name: str) -> Any:
    return attribute_at_home(__name__, _HOMES, name)
