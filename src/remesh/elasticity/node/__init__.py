"""Node side of an elastic job: its agent, with the worker processes, their links and its store access."""

from typing import TYPE_CHECKING

from remesh.foundation.first_use import names_at_first_use

if TYPE_CHECKING:
    from remesh.elasticity.node.agent import run_agent as run_agent
else:
    __getattr__, __dir__ = names_at_first_use(__name__)
