"""How much the tests try, by ``HYPOTHESIS_PROFILE``: what a developer waits for, what CI waits for, and what is new.

Examples and seeds are the same at each run, so that a change fails by its own doing. What has passed a hundred times
proves little more at the next run: by ``default`` the first examples and seeds are tried, by ``thorough`` all, and by
``explore`` all seeds, and examples that nobody has seen.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
# The machine that runs the tests may be busy: a slow example is no failure.
_PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("default", **_PATIENT, derandomize=True, max_examples=25)
settings.register_profile("thorough", **_PATIENT, derandomize=True, max_examples=100)
settings.register_profile("explore", **_PATIENT, max_examples=2000)
settings.load_profile(_PROFILE)
if _PROFILE == "default":
    # The others draw examples from the numbers and texts in all modules that are loaded, too: to look through these
    # takes each worker seconds, and after a change of any of them examples are others.
    providers._get_local_constants = lambda: providers._local_constants  # none

NUM_COSTLY_EXAMPLES = settings().max_examples // 4
"""For a test whose examples take long."""


def so_many(num: int, *, quick: int) -> int:
    """The quick number by default."""
    return quick if _PROFILE == "default" else num


def seeds(num: int, *, quick: int) -> range:
    """So many seeds, from 0; by default only the quick ones."""
    return range(so_many(num, quick=quick))
