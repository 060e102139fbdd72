"""Reshard in windows, of a state that is too large to exist twice: a few tensors at a time.

The old shards of what has moved are freed.

    state = dict(model.state_dict())
    for made in remesh.reshard_by_windows(state, to=target, window_bytes=1 << 30):
        new_state.update(made)                   # its old shards have left ``state`` by now

A window is over when every rank has taken it. So a rank that is lost, or has no memory left, loses nothing for the
others: what has moved is whole where it went, and the rest is still in ``give``.

No rank can know that all others know that a window is over: a rank may be lost while it forwards the message. A rank
that has its own part of a window, and does not know that all have theirs, cannot know whether others have freed their
old shards. So it keeps both, joined in ``give``. Then either all survivors have their old shards, or all have their new
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Unpack

import torch
from torch.distributed.tensor import DTensor

from remesh.comm.gather import Group, gather_from, group_rank
from remesh.foundation.errors import PlanError
from remesh.foundation.options import check_option
from remesh.foundation.torch_private import never_compiled
from remesh.layout.from_torch import Piece, join_if_alike, piece_of
from remesh.resharding.planning.transfer import PlanOptions
from remesh.resharding.planning.window_order import WindowPlan, plan_windows
from remesh.resharding.running.cache import Resharder
from remesh.resharding.running.describe import Tensors, check_plan_options
from remesh.resharding.running.run import UnfilledError
from remesh.resharding.target import Shapes, Targets, gather_shapes, local_bytes, make_targets

_DOING = "planning the windows of a reshard"


@never_compiled
class WindowedReshard:
    """A reshard in windows, agreed on by all ranks; each step of an iteration over it moves one."""

    def __init__(
        self,
        give: MutableMapping[str, torch.Tensor | Piece],
        to: Targets,
        shapes: Shapes,
        plan: WindowPlan,
        *,
        group: Group,
        options: PlanOptions,
    ) -> None:
        self._give, self._to, self._shapes, self._group, self._options = give, to, shapes, group, options
        self._rank = group_rank(group)
        self.plan = plan
        """Windows and bytes of all ranks."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes of old and new shards that this rank holds at one time; staging comes on top."""
        return self.plan.peak_bytes[self._rank] if self.plan.windows else 0

    def __len__(self) -> int:
        return len(self.plan.windows)

    def __iter__(self) -> Iterator[dict[str, DTensor]]:
        """The tensors of each window, made and filled. Every rank goes through all of them.

        Raises as `remesh.reshard` does, on all ranks alike. Then what came and what is in ``give`` have everything.
        """
        for names in self.plan.windows:
            made = self._move(names)
            for name in names:
                self._give.pop(name, None)
            yield made

    def _move(self, names: Sequence[str]) -> dict[str, DTensor]:
        """The tensors of one window, made and filled."""
        give = {name: self._give[name] for name in names if name in self._give}
        to = {name: self._to[name] if isinstance(self._to, Mapping) else self._to for name in names}
        shapes = {name: self._shapes[name] for name in names}
        made: dict[str, DTensor] = {}

        def ask() -> tuple[Tensors, Tensors]:
            made.update(make_targets(to, shapes))
            return give, made

        meeting = Resharder.for_one_call(self._group, self._options).meet(ask)
        try:
            meeting.job.run(meeting.tag)
        except UnfilledError as lost:
            if not lost.unfilled:
                self._keep_both(made)
            raise
        return made

    def _keep_both(self, made: Mapping[str, DTensor]) -> None:
        """Join new shards to the old ones, where they can be one piece."""
        for name, tensor in made.items():
            old, new = self._give.get(name), piece_of(tensor)
            self._give[name] = new if old is None else join_if_alike(piece_of(old), new)


@never_compiled
def reshard_by_windows(
    give: MutableMapping[str, torch.Tensor | Piece],
    *,
    to: Targets,
    window_bytes: int,
    group: Group = None,
    **options: Unpack[PlanOptions],
) -> WindowedReshard:
    """Move tensors to their targets a few at a time; iterate over what is returned to do so.

    In each window no rank makes more than ``window_bytes``, unless one tensor is larger by itself. When a window is
    over its tensors are taken out of ``give``: their memory is free once no other code holds them, so let go of the
    module or state dict that they came from. The order is the one that keeps the peak low, `WindowedReshard.plan` has
    it with each rank's bytes. Tensors that ``to`` does not name stay in ``give``.

    Called by every rank of the group; agrees on the windows, moves nothing yet. Raises the same error on all ranks:
    `PlanError` where windows or targets differ or cannot be, else as `remesh.reshard` does, whose
    ``options`` these are.
    """
    shapes = gather_shapes(give, group)

    def tell() -> list[Any]:
        check_option(_DOING, "window_bytes", window_bytes, int)
        check_plan_options(options)
        if not isinstance(give, MutableMapping):
            raise PlanError(
                f"{_DOING}: give is a {type(give).__name__}, expected a dict, out of which goes what has moved; "
                "give dict(...) of it"
            )
        made = local_bytes(to, shapes)
        held = {name: piece_of(give[name]).tensor.nbytes for name in give if name in made}
        return [window_bytes, held, made]

    told = gather_from(tell, group, _DOING)
    _check_alike([(window, sorted(made)) for window, _, made in told])
    names = sorted(told[0][2])
    sizes = {name: ([held.get(name, 0) for _, held, _ in told], [made[name] for *_, made in told]) for name in names}
    return WindowedReshard(give, to, shapes, plan_windows(sizes, window_bytes), group=group, options=options)


def _check_alike(told: Sequence[tuple[int, list[str]]]) -> None:
    window, names = told[0]
    for rank, (other, others) in enumerate(told):
        if other != window:
            raise PlanError(
                f"{_DOING}: rank {rank} gives window_bytes={other}, rank 0 {window}, expected one number; give all "
                "ranks the same"
            )
        differ = sorted(set(names) ^ set(others))
        if differ:
            raise PlanError(
                f"{_DOING}: rank {rank} and rank 0 do not both have a target for {differ[0]!r} ({len(differ)} such "
                "tensors), expected the same names on all ranks; give all ranks the same targets"
            )
