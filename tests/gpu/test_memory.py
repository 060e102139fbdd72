"""Every verb takes as much memory as it plans: no second state that nobody counted, and no plan far beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory.__main__ import ALLOWED_BYTES
from benchmarks.memory.verbs import VERBS, Told, measure
from remesh.testbed.pool import RankPool
from tests.gpu.settings import CPU, SHARED, Place, Setting, in_settings

STATE_BYTES = 32 << 20
"""Many times what the allowance hides."""
QUICK = {"reshard by windows", "load in another layout", "Refit in place", "job.carry by windows"}
"""The verbs that promise to need no second state."""


def measure_at(place: Place, verb: str, folder: Path) -> Told:
    return measure(verb, STATE_BYTES, folder, place.device.type)


@in_settings(CPU, SHARED)
@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=() if verb in QUICK else pytest.mark.slow) for verb in VERBS]
)
def test_a_verb_takes_what_it_plans(ranks: RankPool, setting: Setting, tmp_path: Path, verb: str) -> None:
    for told in setting.run(ranks, measure_at, verb, tmp_path):
        assert told.planned - STATE_BYTES // 4 <= told.measured <= told.planned + ALLOWED_BYTES, (
            f"planned {told.planned >> 20} MiB, measured {told.measured >> 20}"
        )
