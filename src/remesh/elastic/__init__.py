"""Elastic jobs: survivors keep their processes, take a new mesh, and get what they lack from peers' memory.

``remesh.elastic(train, mesh=...)`` calls :func:`remesh.elastic.api.elastic`. ``mesh`` may be a template that knows how
much memory a worker has: ``remesh.make_template(axes, remesh.Memory(...))``. An iterable dataset is
read by way of ``remesh.Stream(dataset)``.
"""

from typing import TYPE_CHECKING, Any

from remesh.callable_package import make_callable
from remesh.elastic.mesh_policy import Memory, Template, make_template
from remesh.first_use import attribute_at_home

if TYPE_CHECKING:
    from remesh.elastic.training.stream import Stream

__all__ = ["Memory", "Stream", "Template", "make_template"]


_HOMES = {"Stream": "remesh.elastic.training.stream"}
"""It reads with torch, which importing this package must not load."""


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        return attribute_at_home(__name__, _HOMES, name)


make_callable(__name__, "remesh.elastic.api")
