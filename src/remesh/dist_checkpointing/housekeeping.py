"""What lies under a root of checkpoints, and what may go? Listing, and garbage collection of aborted saves.

A checkpoint is removed marker first: a crash halfway leaves a directory that no reader takes for a checkpoint. Only
files that a save writes are removed; a directory with other files in it stays, with those.

An incomplete directory may be an aborted save, or one that is running now. It counts as aborted when a complete
checkpoint of a higher step exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from remesh.dist_checkpointing.commit import IN_PROGRESS_FNAME, is_leftover
from remesh.dist_checkpointing.core import CONFIG_FNAME, sync_directory
from remesh.dist_checkpointing.errors import told_as_checkpoint_errors
from remesh.dist_checkpointing.integrity import SHA256_FNAME
from remesh.dist_checkpointing.plain import step_of
from remesh.dist_checkpointing.reader import why_incomplete
from remesh.dist_checkpointing.retention import Policy, Saved, decide_kept
from remesh.dist_checkpointing.strategies.torch_format import METADATA_FNAME


class State(Enum):
    """What a directory of a step holds."""

    COMPLETE = "complete"
    UNFINISHED = "unfinished"
    """No commit: aborted, or being written."""
    DAMAGED = "damaged"
    """Committed, but not whole any more."""


@dataclass(frozen=True, slots=True)
class Found:
    """A directory named after a step."""

    step: int
    directory: Path
    state: State
    problem: str
    """Why it is not complete; empty if it is."""
    num_bytes: int
    """Of all its files."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a directory, and why."""

    found: Found
    removes: bool
    reason: str


def list_checkpoints(root: Path) -> list[Found]:
    """Every directory under ``root`` that is named after a step, by step."""
    with told_as_checkpoint_errors(f"listing the checkpoints under {root}"):
        steps = {path: step for path in root.iterdir() if (step := step_of(path.name)) is not None}
        found = [_look_at(path, step) for path, step in steps.items() if path.is_dir()]
    return sorted(found, key=lambda one: one.step)


def decide_removals(
    found: Sequence[Found], policies: Sequence[Policy], metrics: Mapping[int, Mapping[str, float]] | None = None
) -> list[Decision]:
    """What to remove of what was found. Pure; ``metrics`` by step serve policies that ask for them."""
    complete = [one.step for one in found if one.state is State.COMPLETE]
    kept = decide_kept([Saved(step, (metrics or {}).get(step, {})) for step in complete], policies)
    newest = max(complete, default=-1)
    decisions = []
    for one in found:
        if one.state is State.COMPLETE:
            decision = Decision(one, one.step not in kept, kept.get(one.step, "no policy keeps it"))
        elif one.state is State.DAMAGED:
            decision = Decision(one, False, f"damaged, for you to look at: {one.problem}")
        elif one.step < newest:
            decision = Decision(one, True, f"an aborted save, step {newest} is complete")
        else:
            decision = Decision(one, False, "may be being written: no later step is complete")
        decisions.append(decision)
    return decisions


def remove_checkpoint(directory: Path) -> list[Path]:
    """Remove what a save wrote into the directory, and the directory if nothing else is in it; returns what stays."""
    with told_as_checkpoint_errors(f"removing checkpoint {directory}"):
        # Uncommitted first, and marked as in progress, so that a crash leaves an aborted save.
        (directory / IN_PROGRESS_FNAME).touch()
        (directory / CONFIG_FNAME).unlink(missing_ok=True)
        sync_directory(directory)
        for path in directory.iterdir():
            if is_leftover(path.name) or path.name == SHA256_FNAME:
                path.unlink()
        (directory / IN_PROGRESS_FNAME).unlink()
        left = sorted(directory.iterdir())
        if not left:
            directory.rmdir()
            sync_directory(directory.parent)
        return left


def _look_at(directory: Path, step: int) -> Found:
    num_bytes = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    is_committed = (directory / CONFIG_FNAME).exists() or (
        (directory / METADATA_FNAME).exists() and not (directory / IN_PROGRESS_FNAME).exists()
    )
    problem = why_incomplete(directory)
    state = State.COMPLETE if not problem else State.DAMAGED if is_committed else State.UNFINISHED
    return Found(step, directory, state, problem, num_bytes)
