"""The kinds of steps: functions of a state and of the step's generator, which draws the same on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from random_kinds import collectives, files, handles, messages, open_ends, types, windows
from random_kinds.state import State


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    step: Callable[[State, random.Random], None]
    weight: int
    """How often it is drawn, against others."""


_WEIGHTS = {
    messages: {
        "ring": 3,
        "replaced": 1,
        "several": 4,
        "modes": 3,
        "fan_in": 4,
        "nowhere": 1,
        "objects": 3,
        "threads": 1,
    },
    open_ends: {"unreceived": 4, "posted": 4, "synchronous": 2, "persistent": 3, "cancelled": 1, "objects_left": 2},
    types: {"between_layouts": 3, "packed": 1},
    collectives: {"blocking": 5, "left_open": 5, "persistent": 2, "objects": 3, "across": 2, "neighbours": 2},
    handles: {"divided": 2, "twinned": 2, "turned": 1, "retired": 2, "short_lived": 2, "attributes": 1, "groups": 1},
    windows: {"fenced": 1, "counted": 1, "partners": 1, "swapped": 1, "piled_up": 2, "settled": 1},
    files: {"records": 1, "shared_pointer": 1},
}
ALL = {
    f"{module.__name__.rpartition('.')[2]}.{name}": Kind(getattr(module, name), weight)
    for module, kinds in _WEIGHTS.items()
    for name, weight in kinds.items()
}
"""By ``module.function``."""
