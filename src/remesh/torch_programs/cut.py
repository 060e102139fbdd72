"""What happens to a process at a cut? It says where it stands, sheds its groups, and grows them again elsewhere."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from typing import Any, Final

from torch.distributed import PrefixStore

from remesh.comm.gloo_sockets import Surroundings, cut_connections, gloo_loops, open_sockets, pick_gloos
from remesh.rounds.status import Activity, ClockStanding, Status, pairs
from remesh.torch_programs.groups import Groups
from remesh.torch_programs.store import CarriedStore, StoreLink

_NOTHING: Final = Surroundings(frozenset(), frozenset())
_COLLECT_AFTER_S: Final = 0.2
"""Of waiting for gloo's threads, before unreachable objects are looked for: most groups are in no circle."""
_GONE_LIMIT_S: Final = 10.0
_PAUSE_S: Final = 0.002


class GroupsAtCut:
    """The groups of this process, for the control thread."""

    def __init__(self, groups: Groups, link: StoreLink, rank: int) -> None:
        self._groups, self._link, self._rank = groups, link, rank

    def describe(self, *, has_ended: bool = False) -> Status:
        """Where the process stands, in the words of the protocol."""
        groups, gate = self._groups, self._groups.gate
        busy = {group.place.key for group in groups.live if group.is_busy()}
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        for group in groups.all:
            group.count_messages(sent, received)
        with gate.changed:
            inside = sorted(busy | {key for key, count in gate.inside.items() if count})
            held = gate.held_keys()
            counts, is_closed, num_passing = dict(gate.entered), gate.is_closed, gate.num_passing
        # What has begun in gloo cannot begin again: it is to be complete on all, as if it were here already.
        standings = {
            key: (counts.get(key, 0), counts.get(key, 0) - (key in inside)) for key in {*counts, *inside, *held}
        }
        left = {group.place.key: () for group in groups.all if not group.is_live}
        members = {**groups.members, **left}
        activity = Activity.INSIDE if inside else Activity.HELD if held else Activity.COMPUTING
        return Status(
            self._rank,
            Activity.FINISHED if has_ended else activity,
            tuple(held),
            tuple(
                (key, ClockStanding(*standings[key], tuple(sorted(members.get(key, ()))))) for key in sorted(standings)
            ),
            pairs(sent),
            pairs(received),
            quiet=not inside and not num_passing,
            closed=is_closed or has_ended,
        )

    def shed(self) -> str:
        """Let go of all connections; why that could not be done, "" if it was. The gate is closed."""
        live = self._groups.live
        if any(group.has_open_messages for group in live):
            # gloo has no other way to end a wait for a message.
            cut_connections(pick_gloos(open_sockets(), _NOTHING))
        have_all = [group.shed(_GONE_LIMIT_S) for group in live]
        self._link.drop()
        if not all(have_all):
            return f"a message is still waited for {_GONE_LIMIT_S:g} s after the connections of its group were cut"
        return _wait_until_gone()

    def grow(self, prefix: str, address: tuple[str, int], ended: Sequence[int]) -> None:
        """Make the groups again, with keys of this prefix in the store at this address. All ranks do this.

        ``ended``: ranks whose programs are over. Groups that a member has left are not made again.
        """
        self._link.move(address)
        store = CarriedStore(self._link, prefix, of_control=True)
        live = self._groups.live
        store.set(str(self._rank), json.dumps({group.place.key: group.received_counts() for group in live}))
        others = sorted({member for group in live for member in group.place.members} - set(ended))
        answers = store.multi_get([str(rank) for rank in others])
        told: dict[int, dict[str, Any]] = {
            rank: json.loads(answer) for rank, answer in zip(others, answers, strict=True)
        }
        for group in live:
            key, members = group.place.key, group.place.members
            if gone := [member for member in members if key not in told.get(member, {})]:
                group.break_off(f"ranks {gone} had left it before the last cut")
                continue
            group.build(PrefixStore(f"{key}/", store))
        for group in live:
            if group.is_live:
                places, key = group.place.members, group.place.key
                group.post_again(lambda peer, places=places, key=key: told[places[peer]][key])  # type: ignore[misc]


def _wait_until_gone() -> str:
    """Until gloo's loops have ended, and their descriptors with them."""
    began_s, has_collected = time.monotonic(), False
    while gloo_loops():
        waited_s = time.monotonic() - began_s
        if waited_s > _COLLECT_AFTER_S and not has_collected:
            gc.collect()
            has_collected = True
        if waited_s > _GONE_LIMIT_S:
            return f"groups are still there {_GONE_LIMIT_S:g} s after they were destroyed: something refers to them"
        time.sleep(_PAUSE_S)
    return ""
