"""What the agents of a job in restart mode learn of each other through their rendezvous."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from remesh.elasticity.launch.rendezvous import ForwardingRendezvous
from remesh.elasticity.launch.restart import EndedElsewhereError, SharedEnd
from remesh.elasticity.model.outcome import WorkerFailure

FAILURE = WorkerFailure(1, 0, "a", 7, 3, 0.0, "the sky is falling")


class _Meeting(ForwardingRendezvous):
    """A rendezvous of two nodes over one store, until it is closed."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__(self)
        self._store, self._rank = store, rank
        self.closed = False
        self.waiting = 0

    def next_rendezvous(self) -> RendezvousInfo:
        if self.closed:
            raise RendezvousClosedError
        return RendezvousInfo(self._store, self._rank, 2, RendezvousStoreInfo("127.0.0.1", 1))

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def shutdown(self) -> bool:
        self.closed = True
        return True


class _Node:
    def __init__(self, store: dist.Store, rank: int) -> None:
        self.meeting = _Meeting(store, rank)
        self.restarts: list[tuple[str, bool]] = []
        self.shared = SharedEnd(self.meeting, lambda reason, uses: self.restarts.append((reason, uses)))
        self.handler: RendezvousHandler = self.shared
        self.handler.next_rendezvous()


def _nodes() -> tuple[_Node, _Node]:
    store = dist.HashStore()
    return _Node(store, 0), _Node(store, 1)


def test_a_failure_that_ends_the_job_is_known_on_the_other_node_at_its_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remesh.elasticity.launch.restart.FAREWELL_GRACE_S", 0.0)
    first, second = _nodes()
    assert second.handler.num_nodes_waiting() == 0
    first.shared.share([FAILURE])
    with pytest.raises(EndedElsewhereError) as raised:
        second.handler.num_nodes_waiting()
    assert [(one.rank, one.message) for one in raised.value.failures] == [(1, "the sky is falling")]
    assert [one.order for one in first.shared.failures()] == [1]


def test_a_node_that_would_restart_when_the_job_has_ended_is_given_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers failed as well, after those of the node that had no restart left and has closed the meeting."""
    monkeypatch.setattr("remesh.elasticity.launch.restart.FAREWELL_GRACE_S", 0.0)
    first, second = _nodes()
    first.shared.share([FAILURE])
    second.meeting.closed = True
    with pytest.raises(EndedElsewhereError) as raised:
        second.handler.next_rendezvous()
    assert [one.rank for one in raised.value.failures] == [1]


def test_a_meeting_that_was_closed_by_nobody_of_this_job_stays_that_error() -> None:
    first, _ = _nodes()
    first.meeting.closed = True
    with pytest.raises(RendezvousClosedError):
        first.handler.next_rendezvous()


def test_a_restart_for_a_node_that_waits_uses_none_up() -> None:
    first, _ = _nodes()
    first.handler.next_rendezvous()
    first.meeting.waiting = 1
    assert first.handler.num_nodes_waiting() == 1
    first.handler.next_rendezvous()
    reasons = [("workers failed", True), ("another node wants to join, or has restarted", False)]
    assert first.restarts == reasons


def test_the_meeting_is_closed_once_the_end_was_shared_and_not_where_a_signal_ends_this_node() -> None:
    """torch's launcher asks for it when workers have ended, before it is known here how, and never after a signal."""
    first, second = _nodes()
    assert first.handler.shutdown() is True and not first.meeting.closed
    first.shared.close()
    second.shared.close()
    assert (first.meeting.closed, second.meeting.closed) == (True, False)
