"""Simulation of blocking exchanges: ranks stop between two actions and exchange what is due.

So torch's ``Schedule1F1B`` works, and any runtime that posts what is due in one batch and waits for all of it. After an
action a rank *demands* what its next action needs, and waits until everything that it made has left. A transfer starts
when its value is made, the taker demands it, and its lines are free; transfers of a rank run side by side.

Algorithm. As in `remesh.pipeline.player`, but the end of a transfer becomes known at the later of post and demand, and
the start of an action when the ends of all transfers that its rank waits for are known.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.edge_values import Pass, pass_of
from remesh.pipeline.player import EdgeRoute, Played, Player

_Key = tuple[Pass, int, int]
"""A pass, the stage that takes, a micro-batch."""


class _Rank:
    """The progress of a rank."""

    def __init__(self, row: Sequence[Action]) -> None:
        self.row = row
        self.position = 0
        self.is_computing = False
        self.free_s = 0.0
        """When its last action has ended and all whose end is known of what that made has left."""
        self.num_leaving = 0
        """How many transfers of what it made have no end yet."""


def play_exchanges(player: Player, rows: Sequence[Sequence[Action]], num_microbatches: int) -> Played:
    """Start and end of every action that gets its turn."""
    return _Exchanges(player, rows, num_microbatches).play()


class _Exchanges:
    def __init__(self, player: Player, rows: Sequence[Sequence[Action]], num_microbatches: int) -> None:
        self._player = player
        self._ranks = [_Rank(row) for row in rows]
        posted = [[[0.0] * num_microbatches for _ in of_pass] for of_pass in player.num_needed]
        self._played = Played([[] for _ in rows], [[] for _ in rows], posted)
        self._line_free_s = [0.0] * player.num_lines
        self._demanded: set[_Key] = set()
        self._waiting: dict[_Key, list[tuple[EdgeRoute, float]]] = {}
        """Made and not demanded yet, with the time of the post."""
        self._arrived: dict[_Key, list[float]] = {}
        """When the values of an action that are known to come are there."""
        self._ends: list[tuple[float, int]] = []

    def play(self) -> Played:
        """All events in the order of time."""
        for number in range(len(self._ranks)):
            self._demand(number, 0.0)
            self._begin(number)
        while self._ends:
            now_s, number = heapq.heappop(self._ends)
            rank = self._ranks[number]
            action = rank.row[rank.position]
            self._played.ends[number].append(now_s)
            rank.position += 1
            rank.free_s = now_s
            rank.is_computing = False
            touched = {number, *self._post(action, now_s), *self._demand(number, now_s)}
            for each in sorted(touched):
                self._begin(each)
        return self._played

    def _post(self, action: Action, now_s: float) -> set[int]:
        """Post what an action made; the ranks that a transfer got its end for."""
        touched: set[int] = set()
        way = pass_of(action.kind)
        for route in () if way is None else self._player.made[way][action.stage]:
            key = (route.way, route.taker, action.microbatch or 0)
            self._played.posted[route.way][route.taker][key[2]] = now_s
            if route.ranks[0] == route.ranks[1]:
                self._arrived.setdefault(key, []).append(now_s)
                touched.add(route.ranks[1])
                continue
            self._ranks[route.ranks[0]].num_leaving += 1
            if key in self._demanded:
                touched |= self._transfer(route, key, now_s, now_s)
            else:
                self._waiting.setdefault(key, []).append((route, now_s))
        return touched

    def _demand(self, number: int, now_s: float) -> set[int]:
        """Demand what the next action of a rank needs; the ranks that a transfer got its end for."""
        key = self._needs(number)
        if key is None:
            return set()
        self._demanded.add(key)
        touched = [self._transfer(route, key, post_s, now_s) for route, post_s in self._waiting.pop(key, [])]
        return set().union(*touched)

    def _needs(self, number: int) -> _Key | None:
        rank = self._ranks[number]
        if rank.position == len(rank.row) or rank.row[rank.position].kind is ActionKind.W:
            return None
        action = rank.row[rank.position]
        way = pass_of(action.kind)
        assert way is not None
        return way, action.stage, action.microbatch or 0

    def _transfer(self, route: EdgeRoute, key: _Key, post_s: float, now_s: float) -> set[int]:
        first, second = route.lines
        start_s = max(now_s, self._line_free_s[first], self._line_free_s[second])
        end_s = self._line_free_s[first] = self._line_free_s[second] = start_s + route.time_s
        self._played.transfers.append((route, key[2], post_s, start_s, end_s))
        self._arrived.setdefault(key, []).append(end_s)
        giver = self._ranks[route.ranks[0]]
        giver.num_leaving -= 1
        giver.free_s = max(giver.free_s, end_s)
        return set(route.ranks)

    def _begin(self, number: int) -> None:
        """Start the next action of a rank, if all that it waits for has its end."""
        rank = self._ranks[number]
        if rank.is_computing or rank.num_leaving or rank.position == len(rank.row):
            return
        action = rank.row[rank.position]
        key = self._needs(number)
        there = [] if key is None else self._arrived.get(key, [])
        if key is not None and len(there) < self._player.num_needed[key[0]][action.stage]:
            return
        start_s = max([rank.free_s, *there])
        rank.is_computing = True
        self._played.starts[number].append(start_s)
        heapq.heappush(self._ends, (start_s + self._player.durations[action.stage][action.kind], number))
