"""Each category has its exit code, and the message says who must act."""

from __future__ import annotations

import errno

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from remesh.elasticity.launch.verdict import outcome_of_error
from remesh.elasticity.model.outcome import Category, Outcome
from remesh.foundation.errors import ConfigError, PeerError, StorageError


@pytest.mark.parametrize(
    ("error", "category", "code"),
    [
        (ConfigError("no such script"), Category.INPUT, 2),
        (StorageError("events folder"), Category.INPUT, 2),
        (RendezvousClosedError(), Category.INPUT, 2),
        (dist.DistNetworkError("EADDRINUSE: port 29500"), Category.INPUT, 2),
        (PeerError("no store answers"), Category.INFRASTRUCTURE, 75),
        (RendezvousTimeoutError(), Category.INFRASTRUCTURE, 75),
        (RendezvousConnectionError("gone"), Category.INFRASTRUCTURE, 75),
        (dist.DistStoreError("timed out"), Category.INFRASTRUCTURE, 75),
        (OSError(errno.ENOSPC, "No space left on device"), Category.INFRASTRUCTURE, 75),
        (KeyError("slot"), Category.PLATFORM, 70),
        (OSError(errno.EPERM, "Operation not permitted"), Category.PLATFORM, 70),
    ],
)
def test_error_has_one_category_and_its_exit_code(error: Exception, category: Category, code: int) -> None:
    outcome = outcome_of_error(error)
    assert (outcome.category, outcome.exit_code) == (category, code)
    line = outcome.describe("node-a").splitlines()[-1]
    assert line.startswith("remesh: job failed on node-a [")
    assert category.who in line


def test_innermost_cause_is_told_and_only_a_defect_brings_its_traceback() -> None:
    error = RendezvousConnectionError("see inner exception")
    error.__cause__ = dist.DistNetworkError("connect to head:29400 failed\nmore lines")
    outcome = outcome_of_error(error)
    assert "connect to head:29400 failed" in outcome.text
    assert "more lines" not in outcome.text
    assert outcome.detail == ""
    assert "KeyError" in outcome_of_error(KeyError("slot")).detail


def test_exit_codes_are_all_different_and_success_is_0() -> None:
    codes = [category.exit_code for category in Category]
    assert len(set(codes)) == len(codes)
    assert Outcome(None, "well").exit_code == 0
