"""Elastic jobs: survivors keep their processes, take a new mesh, and get what they lack from peers' memory.

``remesh.elastic(train, mesh=...)`` calls :func:`remesh.elasticity.job_api.elastic`. ``mesh`` may be a template that
knows how much memory a worker has: ``remesh.make_template(axes, remesh.Memory(...))``. An iterable dataset is
read by way of ``remesh.Stream(dataset)``.
"""

from typing import TYPE_CHECKING

from remesh.foundation.first_use import names_at_first_use

if TYPE_CHECKING:
    from remesh.elasticity.model.mesh_policy import (
        Memory as Memory,
        Template as Template,
        make_template as make_template,
    )
    from remesh.elasticity.training.sample_stream import Stream as Stream
else:
    __getattr__, __dir__ = names_at_first_use(__name__)
