"""In which order? Rounds in which every rank sends at most one message and receives at most one.

A sending whose giver must first receive the chunk takes place in a later round than the one that brings it. No
barrier separates rounds when a plan runs: the rounds fix the order in which each rank posts its messages, and keep
many givers from turning to one taker at the same time.

Algorithm (greedy list scheduling, one round after the other):

1. Rank pairs are visited in the order of the work left at their busier end, so that the rank that will finish last
   is never idle while somebody could serve it.
2. A pair whose two ends are still free in this round sends its next chunk that the giver already has. Chunks that have
   the longest way to go after this pair go first, so that relays fill early.
3. Chunks that arrived in this round may be passed on from the next round.

The order is a function of the sendings alone. With loads that are even in bytes the number of rounds is close to the
largest number of messages of a rank, which is the least possible; greedy promises at most about twice that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from remesh.reshard.relay import Sending

_PAIRS_PER_SORT = 512
"""With more pairs than this, their order is renewed only every so many rounds (a sort costs more than a round)."""


def compute_rounds(sendings: Sequence[Sending]) -> list[int]:
    """The round of each sending, counted from 0; the same on every rank."""
    way_to_go = _heights(sendings)
    next_of: list[list[int]] = [[] for _ in sendings]
    ready: dict[tuple[int, int], list[tuple[int, int]]] = {}
    left_to_send: dict[int, int] = {}
    left_to_take: dict[int, int] = {}
    for number, sending in enumerate(sendings):
        left_to_send[sending.giver] = left_to_send.get(sending.giver, 0) + sending.nbytes
        left_to_take[sending.taker] = left_to_take.get(sending.taker, 0) + sending.nbytes
        queue = ready.setdefault((sending.giver, sending.taker), [])
        if sending.after < 0:
            queue.append((-way_to_go[number], number))
        else:
            next_of[sending.after].append(number)
    for queue in ready.values():
        heapq.heapify(queue)
    rounds = [-1] * len(sendings)
    pairs: list[tuple[int, int]] = []
    done = now = 0
    while done < len(sendings):
        if now % (1 + len(ready) // _PAIRS_PER_SORT) == 0:
            waiting = [pair for pair, queue in ready.items() if queue]
            pairs = sorted(waiting, key=lambda p: (-max(left_to_send[p[0]], left_to_take[p[1]]), p))
        arrived = _one_round(pairs, ready)
        for number in arrived:
            sending = sendings[number]
            rounds[number] = now
            left_to_send[sending.giver] -= sending.nbytes
            left_to_take[sending.taker] -= sending.nbytes
        for later in (later for number in arrived for later in next_of[number]):
            pair = (sendings[later].giver, sendings[later].taker)
            if not ready[pair]:
                pairs.append(pair)
            heapq.heappush(ready[pair], (-way_to_go[later], later))
        done += len(arrived)
        now += 1
    return rounds


def _one_round(pairs: Sequence[tuple[int, int]], ready: dict[tuple[int, int], list[tuple[int, int]]]) -> list[int]:
    """Take one chunk off every pair whose ends are both free; which ones."""
    arrived = []
    sending: set[int] = set()
    taking: set[int] = set()
    for pair in pairs:
        giver, taker = pair
        if giver not in sending and taker not in taking and ready[pair]:
            sending.add(giver)
            taking.add(taker)
            arrived.append(heapq.heappop(ready[pair])[1])
    return arrived


def _heights(sendings: Sequence[Sending]) -> list[int]:
    """How many further sendings hang on each one, along the longest chain."""
    heights = [0] * len(sendings)
    for number in range(len(sendings) - 1, -1, -1):
        after = sendings[number].after
        if after >= 0:
            heights[after] = max(heights[after], heights[number] + 1)
    return heights
