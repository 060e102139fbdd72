"""Public function :func:`elastic`, which a training script calls."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack

import torch

from remesh.checkpoint.storage import Location, location_of, store_of
from remesh.elasticity.link import connect_agent, refuse_job
from remesh.elasticity.model.mesh_policy import Axes, Template, make_template
from remesh.elasticity.training.job import Job
from remesh.elasticity.training.place import JobOptions
from remesh.elasticity.training.training_worker import Exit, TrainingWorker
from remesh.foundation.errors import ConfigError, StorageError
from remesh.foundation.exit_codes import ExitCode
from remesh.foundation.options import check_option, check_options, check_range
from remesh.foundation.settings import LINK, SLOT
from remesh.foundation.torch_private import never_compiled

_DOING = "starting an elastic job"
_LEAST_TIMEOUT_S = 0.001
"""Process groups count their timeouts in milliseconds."""


class Tuning(TypedDict, total=False):
    """Further options of a job."""

    seed: int
    """Seed of the order of samples and of random state (0)."""
    timeout_s: float
    """Bound on every collective, in seconds (600)."""
    snapshot_every: int | None
    """Steps between snapshots in other nodes' memory; None (the default): take none."""
    changed_data: Literal["refuse", "continue", "begin"]
    """Where a job goes on with a dataset of another length, seed or content: end it ("refuse"), go on at the same
    number of samples, or read the new one from its beginning."""


@never_compiled
def elastic(
    train: Callable[[Job], Any],
    mesh: Axes | Template,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    **tuning: Unpack[Tuning],
) -> None:
    """Run ``train(job)`` on every mesh that the job gets, until it returns on all ranks.

    Call it from a script started by ``remesh run``. ``mesh`` maps axis names to sizes, outermost first: a number, a
    list of numbers to choose from, or -1 for the axis that takes all workers left; `make_template` adds what a worker
    has room for. ``train`` is entered anew on each mesh, in the same process. ``checkpoint`` is the folder, or URL, of
    the job's checkpoints; a new job goes on from its newest complete one. ``tuning`` has the fields of `Tuning`. On
    CUDA machines the groups use NCCL, else gloo.

    Returns when the job has ended well; ends the process with exit code 1 when it failed anywhere.
    """
    link_path = LINK.read()
    try:
        check_options(_DOING, tuning, Tuning)
        check_option(_DOING, "save_every", save_every, int | None)
        check_range(
            _DOING,
            "timeout_s",
            tuning.get("timeout_s", _LEAST_TIMEOUT_S),
            least=_LEAST_TIMEOUT_S,
            most=threading.TIMEOUT_MAX,
        )
        for name, every in (("save_every", save_every), ("snapshot_every", tuning.get("snapshot_every"))):
            if every is not None:
                check_range(_DOING, name, every, least=1)
        if save_every is not None and checkpoint is None:
            raise ConfigError(
                f"{_DOING}: save_every={save_every} without a place for checkpoints; give checkpoint='runs/mine', or "
                "leave save_every out"
            )
        template = mesh if isinstance(mesh, Template) else make_template(mesh)
        root = None if checkpoint is None else location_of(checkpoint)
        if root is not None and save_every is not None:
            _check_can_keep(root)
        options = JobOptions(checkpoint=root, save_every=save_every, **tuning)
        _check_own_device()
    except ConfigError as error:
        if link_path:
            refuse_job(connect_agent(link_path), str(error))
        raise
    if not link_path and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            f"{_DOING}: this process was started in restart mode, or by torchrun; start it with `remesh run`, without "
            "--mode restart"
        )
    if not link_path:
        raise ConfigError(
            f"{_DOING}: this process has no agent ({LINK.name} is not set); start the script with "
            "`remesh run --nproc-per-node N script.py`"
        )
    worker = TrainingWorker(connect_agent(link_path), template, options)
    try:
        worker.run(train)
    except Exit as end:
        if not end.ok:
            # The agent prints the cause, once for its node.
            sys.exit(ExitCode.FAILED)


def _check_own_device() -> None:
    """Raise `ConfigError` for a worker without a GPU of its own on a machine where all talk over NCCL."""
    slot = int(SLOT.read())
    if torch.cuda.is_available() and slot >= (found := torch.cuda.device_count()):
        raise ConfigError(
            f"{_DOING}: this is worker {slot} of its machine, counted from 0, and there are {found} GPUs, expected one "
            f"for each worker; start at most {found} (--nproc-per-node), or let all use the CPU (CUDA_VISIBLE_DEVICES= "
            "hides the GPUs)"
        )


def _check_can_keep(root: Location) -> None:
    """Raise `ConfigError` unless this process may write into the folder, which is made if need be.

    The first save may be hours away, and would end the job.
    """
    store, trial = store_of(root), root / f".remesh-trial-{uuid.uuid4().hex}"
    try:
        store.make_directory(root)
        store.put(trial, b"")
        store.remove(trial)
    except (OSError, StorageError) as error:
        raise ConfigError(
            f"{_DOING}: checkpoints cannot be written under {root} ({error}), expected a folder in which every worker "
            "may make files; give another checkpoint=..., mend the rights or the space, or leave save_every out"
        ) from error
