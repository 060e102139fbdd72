"""Elastic jobs: survivors keep their processes, take a new mesh, and get what they lack from peers' memory.

``remesh.elastic(train, mesh=...)`` calls :func:`remesh.elastic.api.elastic`.
"""

from remesh.callable_package import make_callable

make_callable(__name__, "remesh.elastic.api")
