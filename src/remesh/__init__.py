"""Remesh: the state of a running distributed job, carried from any mesh to any other.

Names are resolved at first use: ``import remesh.layout`` stays free of torch.
"""

from typing import TYPE_CHECKING

from remesh.foundation.first_use import names_at_first_use

if TYPE_CHECKING:
    from remesh import (
        checkpoint as checkpoint,
        dist_checkpointing as dist_checkpointing,
        elasticity as elasticity,
        layout as layout,
        pipeline as pipeline,
        resharding as resharding,
        testbed as testbed,
    )
    from remesh.checkpoint.manager import Checkpoints as Checkpoints
    from remesh.checkpoint.plain import load as load, save as save
    from remesh.checkpoint.run.housekeeping import latest_complete as latest_complete
    from remesh.elasticity.job_api import elastic as elastic
    from remesh.elasticity.model.mesh_policy import (
        Memory as Memory,
        Template as Template,
        make_template as make_template,
    )
    from remesh.elasticity.training.job import Job as Job
    from remesh.elasticity.training.sample_stream import Stream as Stream
    from remesh.foundation.errors import (
        ConfigError as ConfigError,
        DeviceError as DeviceError,
        Error as Error,
        ForkError as ForkError,
        FormatError as FormatError,
        LayoutError as LayoutError,
        PeerError as PeerError,
        PlanError as PlanError,
        StorageError as StorageError,
    )
    from remesh.foundation.retention import KeepBest as KeepBest, KeepEvery as KeepEvery, KeepLast as KeepLast
    from remesh.layout.from_torch import Piece as Piece
    from remesh.layout.recorded import Recorded as Recorded, record as record
    from remesh.resharding.faces import (
        redistribute_across as redistribute_across,
        reshard_tensor as reshard_tensor,
    )
    from remesh.resharding.refit import Refit as Refit
    from remesh.resharding.reshard_api import reshard as reshard, reshard_async as reshard_async
    from remesh.resharding.running.cache import Resharder as Resharder
    from remesh.resharding.running.run import Moved as Moved
    from remesh.resharding.target import Target as Target
    from remesh.resharding.windows import reshard_by_windows as reshard_by_windows
    from remesh.version import __version__ as __version__
else:
    __getattr__, __dir__ = names_at_first_use(__name__)
