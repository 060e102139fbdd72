"""An agent that is done waits for those that are not, and for nobody that is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from remesh.elasticity.model.failover import FIRST_OPENING
from remesh.elasticity.node import store_side
from remesh.elasticity.node.store_side import BEAT_INTERVAL_S, BEATS_LOST, StoreSide

SECONDS_OF_WORK = 100.0


class _Shared:
    """A store with the heartbeats of node 1, which works for a while and says goodbye, and of node 2, which is gone."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.kept: dict[str, object] = {}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def put(self, key: str, value: object) -> None:
        self.kept[key] = value

    def get(self, key: str) -> object | None:
        return {} if key == "bye/1" and self.now_s > SECONDS_OF_WORK else self.kept.get(key)

    def count(self, key: str) -> int:
        return int(self.now_s / BEAT_INTERVAL_S) if key == "beat/1" else 7


@pytest.mark.parametrize(
    ("others", "least_s", "most_s"),
    [
        ({2}, 0.0, 3 * BEATS_LOST * BEAT_INTERVAL_S),
        ({1}, SECONDS_OF_WORK, SECONDS_OF_WORK + 1.0),
        ({1, 2}, SECONDS_OF_WORK, SECONDS_OF_WORK + 1.0),
    ],
)
def test_an_agent_that_is_done_waits_for_who_still_beats(monkeypatch, others, least_s, most_s) -> None:
    """Where a pod was, nothing answers any more, not even with a refusal."""
    shared: Any = _Shared()
    monkeypatch.setattr(store_side, "time", SimpleNamespace(monotonic=lambda: shared.now_s, sleep=shared.sleep))
    monkeypatch.setattr(StoreSide, "_is_listening", lambda *_: None)
    side = StoreSide(SimpleNamespace(opening=FIRST_OPENING), shared, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(side._reader, "read_nodes", lambda _: {0, *others})
    side.send_goodbye()
    assert "bye/0" in shared.kept and least_s <= shared.now_s <= most_s
