"""What can be wrong with a pipeline before its first step?"""

from remesh.foundation.errors import ConfigError


class PipelineError(ConfigError):
    """A stage graph, schedule, table, cost or limit cannot be; the caller must mend that description."""
