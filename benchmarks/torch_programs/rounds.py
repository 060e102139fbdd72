"""Cost of a checkpoint round at the leader of a large job: a real coordinator, ranks that are only messages.

What is real: the coordinator, its round, job folder and manifest; every message is packed and read as JSON and counted,
in both directions. What is not: no socket carries them, ranks answer at once, and write no image. Each rank has three
groups, as FSDP with tensor parallelism over eight ranks makes them, and every second one is one collective behind, so
that targets are sent and reached.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.report import Row, at_most
from remesh.carried.rounds import leader
from remesh.carried.rounds.checkpointing import Settings
from remesh.carried.rounds.job_folder import JobFolder, JobSpec
from remesh.carried.rounds.leader import Coordinator
from remesh.carried.rounds.members import pack_members
from remesh.carried.rounds.status import Activity, ClockProgress, Status, pairs
from remesh.foundation.collector import collector_at_rest
from remesh.wire.messages import Message

SIZES = (64, 1024, 16384)
QUICK_SIZES = (64, 1024)
GOAL_EXPONENT = 1.1
"""Near linear: messages and bytes grow at most like the number of ranks to this power."""
GOAL_TIME_EXPONENT = 1.25
_TENSOR_RANKS = 8
_REACHED = 100


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What one round cost its leader."""

    num_ranks: int
    messages: int
    num_bytes: int
    """Of the messages, as JSON."""
    seconds: float
    """Processor time of the leader, from the request to the end."""


class _Wire:
    """In place of the coordinator's server: messages wait here, as text, until they are taken."""

    def __init__(self, _token: object, on_message: Callable[[Any, Message], None], *_: object) -> None:
        self._on_message = on_message
        self.to_leader: list[tuple[int, str]] = []
        self.to_ranks: list[tuple[int, str]] = []
        self.messages = self.num_bytes = 0

    def tell(self, rank: int, message: Message) -> None:
        self.to_ranks.append((rank, self._count(json.dumps(message))))

    def say(self, rank: int, text: str) -> None:
        self.to_leader.append((rank, self._count(text)))

    def poll(self, _timeout_s: float) -> None:
        waiting, self.to_leader = self.to_leader, []
        for rank, text in waiting:
            self._on_message(rank, json.loads(text))

    def close(self) -> None:
        """Nothing was opened."""

    def _count(self, text: str) -> str:
        self.messages += 1
        self.num_bytes += len(text)
        return text


class _Rank:
    """One rank, which is as far as it was told."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        first = rank - rank % _TENSOR_RANKS
        self._groups = {
            "world": range(num_ranks),
            f"tp-{first}": range(first, first + _TENSOR_RANKS),
            f"dp-{rank % _TENSOR_RANKS}": range(rank % _TENSOR_RANKS, num_ranks, _TENSOR_RANKS),
        }
        self._neighbours = {(rank - 1) % num_ranks: 5, (rank + 1) % num_ranks: 5}
        self._done = dict.fromkeys(self._groups, _REACHED - rank % 2)

    def answer(self, message: Message) -> Message | None:
        if message["type"] == "ask":
            self._done |= {key: number for key, number in (message["targets"] or {}).items() if key in self._done}
            return {"type": "status", "wave": message["wave"], "status": self._status(message["step"] == "close")}
        if message["type"] == "image":
            return {"type": "imaged", "problem": "", "report": {"num_bytes": 1, "caught": {}, "has_image": True}}
        return None

    def _status(self, is_closed: bool) -> Any:
        standings = {key: ClockProgress(done, done, ()) for key, done in self._done.items()}
        messages = pairs(self._neighbours)
        status = Status(
            self.rank, Activity.COMPUTING, (), tuple(sorted(standings.items())), messages, messages, closed=is_closed
        )
        told = status.to_json()
        for standing in told["standings"]:
            standing[3] = _packed(self._groups[standing[0]])
        return told


@lru_cache(None)
def _packed(members: range) -> list[int | list[int]]:
    """As `Status.to_json` writes them; real ranks do so each for itself."""
    return pack_members(members)


def measure_round(num_ranks: int) -> RoundCost:
    """One round of a job of so many ranks, whose leader has heard of all of them before."""
    with tempfile.TemporaryDirectory() as place, patch.object(leader, "Server", _Wire), collector_at_rest():
        folder = JobFolder.create(Path(place) / "job", JobSpec(("train.py",), num_ranks, "/", {}))
        coordinator = Coordinator(folder, num_ranks, Settings())
        wire: Any = coordinator._server
        ranks = [_Rank(rank, num_ranks) for rank in range(num_ranks)]
        for rank in range(num_ranks):
            wire.say(rank, json.dumps({"type": "hello", "rank": rank, "size": num_ranks, "pid": 1, "host": "h"}))
            wire.say(rank, json.dumps({"type": "ready"}))
        coordinator.step(0.0)
        assert coordinator.all_ready
        wire.messages = wire.num_bytes = 0
        coordinator.request_checkpoint(stop=False)
        seconds = sum(_lead(coordinator, wire, ranks))
        coordinator.close()
        return RoundCost(num_ranks, wire.messages, wire.num_bytes, seconds)


def _lead(coordinator: Coordinator, wire: _Wire, ranks: list[_Rank]) -> Iterator[float]:
    """Processor seconds of each of the leader's steps, until the round is over; ranks answer between them."""
    while coordinator.last_checkpoint is None or wire.to_ranks:
        began_s = time.process_time()
        coordinator.step(0.0)
        yield time.process_time() - began_s
        waiting, wire.to_ranks = wire.to_ranks, []
        for rank, text in waiting:
            if (answer := ranks[rank].answer(json.loads(text))) is not None:
                wire.say(rank, json.dumps(answer))
        assert coordinator.outcome is None, coordinator.outcome


def rows(sizes: tuple[int, ...]) -> list[Row]:
    """All cases: each size, and how they grow."""
    costs = [measure_round(size) for size in sizes]
    found = []
    for cost in costs:
        case = f"round of {cost.num_ranks} simulated ranks"
        found += [
            Row(f"{case}: control messages a rank", cost.messages / cost.num_ranks, "messages"),
            Row(f"{case}: bytes a rank", cost.num_bytes / cost.num_ranks, "B"),
            Row(f"{case}: processor time of its leader", cost.seconds, "s"),
        ]
    for less, more in pairwise(costs):
        case = f"growth from {less.num_ranks} to {more.num_ranks} ranks"
        found += [
            at_most(f"{case}: messages", _exponent(less, more, "messages"), "exponent", GOAL_EXPONENT),
            at_most(f"{case}: bytes", _exponent(less, more, "num_bytes"), "exponent", GOAL_EXPONENT),
            at_most(f"{case}: time", _exponent(less, more, "seconds"), "exponent", GOAL_TIME_EXPONENT),
        ]
    return found


def _exponent(less: RoundCost, more: RoundCost, what: str) -> float:
    return math.log(getattr(more, what) / getattr(less, what)) / math.log(more.num_ranks / less.num_ranks)
