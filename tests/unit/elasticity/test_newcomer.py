"""A node that comes in the moment in which the job moves to another store goes there by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import Std

from remesh.elasticity.membership.rules import AgentRules
from remesh.elasticity.model.failover import FIRST_OPENING, Place
from remesh.elasticity.model.generation import MeetingRules
from remesh.elasticity.model.outcome import Outcome
from remesh.elasticity.node import agent
from remesh.elasticity.node.agent import run_agent
from remesh.elasticity.node.config import AgentConfig
from remesh.elasticity.node.store_side import MovedBeforeError, StoreSide
from remesh.elasticity.store.card import JobCard
from remesh.elasticity.telemetry.events import EventLog
from remesh.wire.token import Token


def test_a_newcomer_learns_from_a_store_that_was_left_where_the_job_is() -> None:
    home: Any = SimpleNamespace(
        opening=FIRST_OPENING, take_refusals=list, read_moved=lambda _: (Place(1, 7), "10.0.0.7:29411")
    )
    shared: Any = SimpleNamespace(count=lambda *_, **__: 1)
    with pytest.raises(MovedBeforeError) as raised:
        StoreSide(home, shared, 3).beat((), EventLog(None, "agent-3"))
    assert raised.value.endpoint == "10.0.0.7:29411"


def test_an_agent_whose_job_is_elsewhere_joins_it_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run_once(config: AgentConfig, _: object) -> Outcome:
        asked.append(config.endpoint)
        if len(asked) == 1:
            raise MovedBeforeError("10.0.0.7:29411")
        return Outcome(None, "all workers ended well")

    monkeypatch.setattr(agent, "_run_once", run_once)
    rules = AgentRules(1, 0, MeetingRules(1, 2, 1.0, 5.0, 20.0), 10.0, 5.0)
    card, token = JobCard("in-process", 1, 2, "x.py"), Token("job", b"")
    place = ("job", "head:29400", None, "c", "127.0.0.1")
    config = AgentConfig(("true",), rules, *place, None, Std.NONE, Std.NONE, None, card, token)
    assert run_agent(config).is_ok
    assert asked == ["head:29400", "head:29400,10.0.0.7:29411"]
