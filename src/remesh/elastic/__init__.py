"""Elastic jobs: survivors keep their processes, take a new mesh, and get what they lack from peers' memory.

``remesh.elastic(train, mesh=...)`` calls :func:`remesh.elastic.api.elastic`. ``mesh`` may be a template that knows how
much memory a worker has: ``remesh.elastic.make_template(axes, remesh.elastic.Memory(...))``.
"""

from remesh.callable_package import make_callable
from remesh.elastic.mesh_policy import Memory, Template, make_template

__all__ = ["Memory", "Template", "make_template"]

make_callable(__name__, "remesh.elastic.api")
