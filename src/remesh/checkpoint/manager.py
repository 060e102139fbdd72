"""Manager of the checkpoints of a run: which is the newest, which the best, and which may go.

    save   wait for the save before; refuse a step that is not after the newest; save; then remove what no policy keeps
    load   wait; the newest complete checkpoint, or that of a step

The first rank looks into the folder each time and sends the others what it found: all ranks agree, and nothing is
remembered that a crash could make wrong. A directory counts once its save has committed; what a killed save left is
removed when a later step is complete. The newest complete checkpoint is never removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from remesh.checkpoint.background.saving_thread import BackgroundSave, thread_of
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError, CheckpointPathError
from remesh.checkpoint.plain import load, save_with_metrics
from remesh.checkpoint.plan.step_names import step_name, step_of
from remesh.checkpoint.run.collective_steps import take_step
from remesh.checkpoint.run.housekeeping import (
    State,
    decide_removals,
    latest_complete,
    list_checkpoints,
    remove_checkpoint,
)
from remesh.checkpoint.run.metrics_file import check_is_known, encode_metrics, read_metrics
from remesh.checkpoint.storage import Directory, Location, location_of, store_of
from remesh.comm.agreement import check_alike
from remesh.comm.gather import Group, check_group, group_rank
from remesh.foundation.errors import ForkError
from remesh.foundation.options import OptionError, check_option
from remesh.foundation.retention import KeepBest, KeepEvery, KeepLast, Policy, Saved
from remesh.foundation.torch_private import never_compiled

T = TypeVar("T")
logger = logging.getLogger(__name__)


@never_compiled
class Checkpoints:
    """The checkpoints of one run, under ``root``: a path, or a URL of an object store or any store that fsspec knows.

    ``keep`` is how many of the newest stay, or a list of `KeepLast`, `KeepEvery` and `KeepBest` of
    `remesh.foundation.retention`: what any of them keeps stays, and the newest stays always; None keeps all. With
    ``background`` a save returns once the values are copied, and at most one is under way. Every rank of the group
    makes one of these and calls the same methods in the same order. As a context manager it waits for the last save at
    its end.
    """

    def __init__(
        self,
        root: Directory,
        *,
        keep: int | Sequence[Policy] | None = None,
        background: bool = False,
        group: Group = None,
    ) -> None:
        doing = "managing checkpoints"
        check_option(doing, "keep", keep, int | Sequence[KeepLast | KeepEvery | KeepBest] | None)
        check_option(doing, "background", background, bool)
        check_group(group)
        self.root: Location = location_of(root)
        self._policies: Sequence[Policy] = [KeepLast(keep)] if isinstance(keep, int) else list(keep or ())
        self._background = background
        self._group = group
        self._under_way: list[BackgroundSave[Any]] = []
        """The last save, then the removal of older ones."""

    def save(self, step: int, state: dict[str, Any], *, metrics: Mapping[str, float] | None = None) -> Future[Location]:
        """Save the state as the checkpoint of a step, as `remesh.save` does; then remove what no policy keeps.

        ``metrics`` is what was measured at this step, such as ``{"loss": 2.5}``: equal on all ranks, so average it over
        them first. `best` and `KeepBest` go by it.

        Called by every rank. Waits for the previous save, and raises its error here, the same on all ranks, unless
        its future has raised that everywhere already. Steps
        go up: `CheckpointMismatchError` for one that is not after the newest; `drop_after` makes room for going back.
        `OptionError` for metrics that are no numbers, differ between ranks, or lack one that ``keep`` asks for.
        """
        self.wait()
        doing = f"saving step {step} under {self.root}"
        self._agree(lambda: self._look_before(step, metrics, doing), f"saving a step under {self.root}")
        measured = encode_metrics(metrics).encode() if metrics else b""
        saved = save_with_metrics(state, self.path_of(step), self._group, self._background, measured)
        if isinstance(saved, BackgroundSave):
            self._under_way = [saved]
        if self._policies and group_rank(self._group) == 0:
            self._clear_after(saved)
        return saved

    def latest(self) -> int | None:
        """The newest step whose checkpoint is complete; None if there is none.

        Called by every rank; all get the same. A save in the background counts from its commit on.
        """
        return self._first_decides(self._newest, f"looking for the newest checkpoint under {self.root}")

    def steps(self) -> list[int]:
        """The steps whose checkpoints are complete, lowest first. Called by every rank; all get the same."""

        return self._first_decides(self._complete, f"listing the checkpoints under {self.root}")

    def best(self, metric: str, *, largest: bool = False) -> int | None:
        """The step with the smallest value of a metric, or the largest; of equal ones the later step.

        Only complete checkpoints count that were saved with this metric, and not as NaN; None if there is none.
        `CheckpointMismatchError` if there are metrics, but none of this name. Called by every rank; all get the same.
        """
        doing = f"looking for the best checkpoint under {self.root}"
        self._agree(lambda: {**_checked(doing, str, metric=metric), **_checked(doing, bool, largest=largest)}, doing)

        def look() -> int | None:
            found = self._metrics()
            if any(found.values()):
                check_is_known(metric, found.values(), doing)
            policy = KeepBest(metric, 1, largest)
            return next(iter(policy.kept([Saved(step, metrics) for step, metrics in found.items()])), None)

        return self._first_decides(look, doing)

    def metrics(self) -> dict[int, dict[str, float]]:
        """The metrics of each complete checkpoint by step, lowest first; empty where none were given.

        Called by every rank; all get the same.
        """
        decided = self._first_decides(
            lambda: list(self._metrics().items()), f"reading the metrics of the checkpoints under {self.root}"
        )
        return dict(decided)

    def load(
        self, state: dict[str, Any], step: int | None = None, *, strict: bool = True, allow_unsafe_types: bool = False
    ) -> dict[str, Any]:
        """Load the checkpoint of a step, or the newest complete one, as `remesh.load` does. Called by every rank.

        Waits for a save that is under way. `CheckpointPathError` where there is none.
        """
        self.wait()
        doing = f"loading a checkpoint under {self.root}"
        self._agree(lambda: _checked(doing, int | None, step=step), doing)
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise CheckpointPathError(
                f"loading the newest checkpoint under {self.root}: found none that is complete; check latest() "
                "first, which is None "
                "where a run begins"
            )
        path = self.path_of(chosen)
        return load(state, path, group=self._group, strict=strict, allow_unsafe_types=allow_unsafe_types)

    def drop_after(self, step: int) -> list[int]:
        """Remove every checkpoint after a step, so that a run can continue from there; returns the steps removed.

        Called by every rank."""
        self.wait()
        doing = f"dropping checkpoints under {self.root}"
        self._agree(lambda: _checked(doing, int, step=step), doing)

        def drop() -> list[int]:
            if not store_of(self.root).is_directory(self.root):
                return []
            later = [one for one in reversed(list_checkpoints(self.root)) if one.step > step]
            for one in later:
                remove_checkpoint(one.directory)
            return [one.step for one in later]

        return self._first_decides(drop, doing)

    def path_of(self, step: int) -> Location:
        """The directory of the checkpoint of a step, whether it exists or not."""
        check_option(f"naming a checkpoint under {self.root}", "step", step, int)
        return self.root / step_name(step)

    def wait(self) -> None:
        """Wait for a save in the background, and raise its error, the same on all ranks. Called by every rank.

        An error that its future has raised on all ranks is not raised again. A fork waits for nothing of its parent.
        """
        under_way, self._under_way = self._under_way, []
        failures = [one.failure() for one in under_way]
        if not failures or failures[0] is None or isinstance(failures[0], ForkError):
            return
        doing = f"saving a step under {self.root}"
        if not all(take_step(lambda: under_way[0].was_raised, self._group, doing, tell=bool).told):
            under_way[0].result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if raised is None:
            self.wait()

    def _look_before(self, step: int, metrics: Mapping[str, float] | None, doing: str) -> dict[str, Any]:
        """Check what this rank was given, and on the first rank the step; returns what to compare over ranks."""
        check_option(doing, "step", step, int)
        check_option(doing, "metrics", metrics, Mapping[str, float] | None)
        for policy in self._policies:
            if isinstance(policy, KeepBest) and metrics and policy.metric not in metrics:
                raise OptionError(
                    f"{doing}: option 'metrics' has {', '.join(sorted(metrics))}, expected {policy.metric!r} among "
                    "them, which `keep` compares; give it, or no metrics at this step"
                )
        if group_rank(self._group) == 0:
            self._check_is_after(step, doing)
        return {"step": step, "metrics": encode_metrics(metrics or {}), "keep": str(self._policies)}

    def _check_is_after(self, step: int, doing: str) -> None:
        newest = self._newest()
        lowest = 0 if newest is None else newest + 1
        if step < lowest:
            raise CheckpointMismatchError(
                f"{doing}: expected a step from {lowest} on, since the newest checkpoint is of step {newest}; to go "
                "on from an "
                "earlier one, call drop_after with its step first"
            )

    def _clear_after(self, saved: Future[Location]) -> None:
        """Remove old checkpoints, on the first rank only. One that cannot be removed keeps no other one.

        It is tried again after the next save.
        """

        def clear() -> None:
            if Future.exception(saved) is not None:  # without marking the error as given to a caller
                return
            try:
                metrics = self._metrics() if any(isinstance(one, KeepBest) for one in self._policies) else {}
                decisions = decide_removals(list_checkpoints(self.root), self._policies, metrics)
            except Exception as raised:
                logger.warning("removing old checkpoints under %s: %s", self.root, raised)
                return
            for one in decisions:
                try:
                    if one.removes:
                        remove_checkpoint(one.found.directory)
                except Exception as raised:
                    logger.warning("removing checkpoint %s: %s", one.found.directory, raised)

        if self._background:
            self._under_way.append(thread_of(self._group).put(clear))
        else:
            clear()

    def _newest(self) -> int | None:
        found = latest_complete(self.root)
        return None if found is None else step_of(found.name)

    def _complete(self) -> list[int]:
        if not store_of(self.root).is_directory(self.root):
            return []
        return [one.step for one in list_checkpoints(self.root) if one.state is State.COMPLETE]

    def _metrics(self) -> dict[int, dict[str, float]]:
        return {step: read_metrics(self.path_of(step)) for step in self._complete()}

    def _agree(self, check: Callable[[], dict[str, Any]], doing: str) -> None:
        """Compare over ranks what ``check`` returns by name once it has found no fault with it. Called by every rank.

        Of what only the first rank does the others would never notice that they asked for something else.
        """
        together = take_step(check, self._group, doing, tell=lambda it: it)
        check_alike(together.told, together.mine.__getitem__, self._group, doing)

    def _first_decides(self, look: Callable[[], T], doing: str) -> T:
        """Call the function on the first rank, and return its result on all ranks."""
        is_first = group_rank(self._group) == 0
        found: T = take_step(lambda: look() if is_first else None, self._group, doing, tell=lambda one: one).told[0]
        return found


def _checked(doing: str, expected: Any, **options: Any) -> dict[str, Any]:
    for name, value in options.items():
        check_option(doing, name, value, expected)
    return options
