"""Listing of the checkpoints under a root, and garbage collection of aborted saves.

A checkpoint is removed marker first: a crash halfway leaves a directory that no reader takes for a checkpoint. Only
files that a save writes are removed; a directory with other files in it stays, with those.

An incomplete directory may be an aborted save, or one that is running now. It counts as aborted when a complete
checkpoint of a higher step exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from remesh.checkpoint.checkpoint_errors import CheckpointPathError, as_checkpoint_errors
from remesh.checkpoint.formats.directory import CONFIG_FNAME, METADATA_FNAME, is_leftover, maybe_load_config
from remesh.checkpoint.formats.zarr_format import folders_below, remove_arrays
from remesh.checkpoint.plan.step_names import step_of
from remesh.checkpoint.run.reader import is_complete, why_incomplete
from remesh.checkpoint.storage import Directory, Entry, Location, location_of, store_of
from remesh.checkpoint.storage.integrity import SHA256_FNAME
from remesh.checkpoint.storage.save_lock import IN_PROGRESS_FNAME, is_commit, is_lock_file
from remesh.foundation.retention import Policy, Saved, decide_kept
from remesh.foundation.torch_private import never_compiled

_MAX_LOOKS = 10
"""At a checkpoint whose files change meanwhile."""


class State(Enum):
    """The state of a directory that is named after a step."""

    COMPLETE = "complete"
    UNFINISHED = "unfinished"
    """No commit: aborted, or being written."""
    DAMAGED = "damaged"
    """Committed, but not whole any more; or this process may not look at it."""


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A directory named after a step."""

    step: int
    directory: Location
    state: State
    problem: str
    """Why it is not complete; empty if it is."""
    num_bytes: int
    """Of all its files; none where a symbolic link stands for it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one directory, with the reason."""

    found: ListedCheckpoint
    removes: bool
    reason: str


@never_compiled
def latest_complete(root: Directory) -> Location | None:
    """The newest complete checkpoint under ``root``, by step, or None.

    Looks at directories with names such as ``step-00000120``; incomplete and damaged ones are skipped.
    """
    place = location_of(root)
    store = store_of(place)
    if not store.is_directory(place):
        return None
    names = {entry.name: step for entry in store.entries(place) if (step := step_of(entry.name)) is not None}
    for name in sorted(names, key=lambda name: names[name], reverse=True):
        if is_complete(place / name):
            return place / name
    if not names and maybe_load_config(place) is not None:
        raise CheckpointPathError(
            f"looking for checkpoints under {place}: this is a checkpoint itself, expected the folder that holds "
            f"them; give {place.parent}"
        )
    return None


def list_checkpoints(root: Location) -> list[ListedCheckpoint]:
    """Every directory under ``root`` that is named after a step, by step."""
    with as_checkpoint_errors(f"listing the checkpoints under {root}"):
        steps = {entry.name: step_of(entry.name) for entry in store_of(root).entries(root) if not entry.is_file}
        found = [_look_at(root / name, step) for name, step in steps.items() if step is not None]
    return sorted((one for one in found if one is not None), key=lambda one: one.step)


def decide_removals(
    found: Sequence[ListedCheckpoint],
    policies: Sequence[Policy],
    metrics: Mapping[int, Mapping[str, float]] | None = None,
) -> list[Decision]:
    """Decide which of these directories to remove. Pure; ``metrics`` by step serve policies that ask for them."""
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


def remove_checkpoint(directory: Location) -> list[Location]:
    """Remove what a save wrote into the directory, and the directory if nothing else is in it; returns what stays.

    Of a symbolic link the link goes, and nothing behind it.
    """
    with as_checkpoint_errors(f"removing checkpoint {directory}"):
        store = store_of(directory)
        if store.is_link(directory):
            store.remove_directory(directory)
            return []
        # Uncommitted first, and marked as in progress, so that a crash leaves an aborted save.
        store.put(directory / IN_PROGRESS_FNAME, b"")
        for entry in store.entries(directory):
            if is_lock_file(entry.name) and entry.name != IN_PROGRESS_FNAME:
                store.remove(directory / entry.name)
        store.remove(directory / CONFIG_FNAME)
        store.sync_names(directory)
        remove_arrays(directory)
        names = [entry.name for entry in store.entries(directory) if entry.name != IN_PROGRESS_FNAME]
        removed = [name for name in names if is_leftover(name) or name == SHA256_FNAME]
        for name in removed:
            store.remove(directory / name)
        store.remove(directory / IN_PROGRESS_FNAME)
        left = [directory / name for name in names if name not in removed]
        if not left:
            store.remove_directory(directory)
        return left


def _look_at(directory: Location, step: int) -> ListedCheckpoint | None:
    """None for one that is gone. One that is being removed is looked at again: that is neither damage nor an error."""
    store = store_of(directory)
    for _ in range(_MAX_LOOKS):
        try:
            entries = store.entries(directory)
            found = _describe(directory, step, entries)
            if found.state is not State.DAMAGED or store.entries(directory) == entries:
                return found
        except FileNotFoundError:
            pass
        except PermissionError as raised:  # it must not end the look at all others
            return ListedCheckpoint(step, directory, State.DAMAGED, f"it may not be read: {raised}", 0)
        if not store.is_directory(directory):
            return None
    raise CheckpointPathError(f"looking at checkpoint {directory}: its files change all the time; try again later")


def _describe(directory: Location, step: int, entries: Sequence[Entry]) -> ListedCheckpoint:
    names = {entry.name for entry in entries}
    num_bytes = sum(entry.num_bytes or 0 for entry in entries)
    num_bytes += sum(sum(sizes.values()) for _, sizes in folders_below(directory, entries))
    num_bytes = 0 if store_of(directory).is_link(directory) else num_bytes
    is_committed = CONFIG_FNAME in names or (METADATA_FNAME in names and is_commit(directory, METADATA_FNAME))
    problem = why_incomplete(directory)
    state = State.COMPLETE if not problem else State.DAMAGED if is_committed else State.UNFINISHED
    return ListedCheckpoint(step, directory, state, problem, num_bytes)
