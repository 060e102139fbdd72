"""Ranks of a job as its leader sees them: their reports, and the messages to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from remesh.wire.messages import Message
from remesh.wire.server import Peer


class Ranks:
    """The ranks of one run of a job."""

    def __init__(self, num_ranks: int, tell: Callable[[Peer, Message], None]) -> None:
        """``tell`` sends a message to the process of a rank, if its line still holds."""
        self.num_ranks = num_ranks
        self._tell = tell
        self._peers: dict[int, Peer] = {}
        self._rank_of: dict[Peer, int] = {}
        """The rank of each peer whose line holds."""
        self._hellos: dict[int, Message] = {}
        self.ready: dict[int, Message] = {}
        """The words of each rank whose program runs."""
        self.ended: dict[int, int] = {}
        """The exit status of each program that has ended."""
        self._met: dict[str, set[int]] = {}
        """The ranks that wait for all others at a step of their restart, by its name."""
        self.left: set[int] = set()
        """Ranks whose lines may break: they have announced that they go."""

    def add(self, peer: Peer, hello: Message) -> str:
        """Take a rank that has come up; returns why it cannot be one of this job's, "" if it is."""
        rank, size = int(hello["rank"]), int(hello["size"])
        if size != self.num_ranks or rank in self._peers:
            return (
                f"rank {rank} of {size} came up, expected each of {self.num_ranks} once; the launcher may have started"
                " single processes, because it does not belong to the library that they run by"
            )
        self._peers[rank], self._rank_of[peer] = peer, rank
        self._hellos[rank] = hello
        return ""

    def find(self, peer: Peer) -> int | None:
        """The rank whose line this is; None for the line of another process."""
        return self._rank_of.get(peer)

    def drop(self, peer: Peer) -> int | None:
        """The rank that is lost because this line broke; None if no rank is."""
        rank = self._rank_of.pop(peer, None)
        return None if rank in self.left else rank

    def meet(self, rank: int, step: str) -> None:
        """Note that a rank has come as far as this step; once all have, each is told."""
        met = self._met.setdefault(step, set())
        met.add(rank)
        if len(met) == self.num_ranks:
            self.send_all({"type": "met", "step": step})

    @property
    def all_ready(self) -> bool:
        """Whether every rank's program runs, or has run."""
        return len(self.ready) == self.num_ranks

    @property
    def all_ended(self) -> bool:
        """Whether every rank's program has ended."""
        return len(self.ended) == self.num_ranks

    def present(self) -> set[int]:
        """Those that have come up."""
        return set(self._peers)

    def send_all(self, message: Message) -> None:
        """Send every rank the same message."""
        self.send_each(dict.fromkeys(self._peers, message))

    def send_each(self, messages: Mapping[int, Message]) -> None:
        """Send every rank the message that is meant for it."""
        for rank, peer in list(self._peers.items()):
            self._tell(peer, messages[rank])

    def host_of(self, rank: int) -> str:
        """The host on which a rank has come up."""
        return str(self._hellos.get(rank, {}).get("host", "(unknown)"))

    def hosts(self) -> list[str]:
        """All hosts, each once."""
        return sorted({self.host_of(rank) for rank in self._hellos})

    def made_by(self) -> dict[str, list[str]]:
        """The answers of the ranks about what runs them: all different ones, by name."""
        told = [dict(hello.get("made_by", {})) for hello in self._hellos.values()]
        return {name: sorted({str(each[name]) for each in told if name in each}) for each in told for name in each}

    def describe(self) -> list[dict[str, Any]]:
        """Describe the ranks, for people."""
        return [
            {"rank": rank, "host": self.host_of(rank), "pid": hello.get("pid"), "ended": self.ended.get(rank)}
            for rank, hello in sorted(self._hellos.items())
        ]
