"""Error of a pipeline description: a graph, schedule, table, cost or limit that cannot be."""

from remesh.foundation.errors import ConfigError


class PipelineError(ConfigError):
    """A stage graph, schedule, table, cost or limit cannot be; the caller must mend that description."""
