"""What is being started may take as long as it gets on, and not much longer."""

from __future__ import annotations

import pytest

from remesh.testbed import quiet_limit, rank_process
from remesh.testbed.rank_process import START_TIMEOUT_S, start_limit


def test_a_start_is_over_when_nothing_has_moved_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, work = 0.0, {1: 5, 2: 7}
    monkeypatch.setattr(quiet_limit.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(rank_process, "work_of", lambda pid: work[pid])
    limit = start_limit([1, None, 2])
    for _ in range(10):  # slow, but one of them gets on
        now_s += 0.9 * START_TIMEOUT_S
        work[2] += 1
        assert not limit.is_over()
    now_s += 0.9 * START_TIMEOUT_S
    assert not limit.is_over()
    now_s += 0.2 * START_TIMEOUT_S
    assert limit.is_over()
    work[1] += 1
    assert not limit.is_over()


def test_a_limit_begins_when_it_is_asked_first_and_again_with_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = 100.0, ["log"]
    monkeypatch.setattr(quiet_limit.time, "monotonic", lambda: now_s)
    limit = quiet_limit.QuietLimit(lambda: len(told), 10)
    assert not limit.is_over()
    now_s += 9
    told.append("a line")
    assert not limit.is_over()
    now_s += 9
    assert not limit.is_over()
    now_s += 2
    assert limit.is_over()
