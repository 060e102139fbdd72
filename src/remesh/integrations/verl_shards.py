"""Engine name for which verl hands over its training engine, and with it the shards that ranks hold.

    actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=remesh.integrations.verl_shards

Takes the place of verl's own engine of that name, in jobs that import this module.
"""

from __future__ import annotations

from remesh.integrations.verl import RemeshCheckpointEngine

from verl.checkpoint_engine.base import CheckpointEngineRegistry  # isort: skip - what is missing is reported first

CheckpointEngineRegistry.register("delta_sharded")(RemeshCheckpointEngine)
