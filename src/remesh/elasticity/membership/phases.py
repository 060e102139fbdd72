"""Table of an agent's phases and transitions, which its state machine obeys.

:mod:`remesh.elasticity.membership.membership_machine` refuses a change of phase that is not in `TRANSITIONS`; the
diagram of ``docs/elastic/protocol.md`` is drawn from it, and a test sees every row happen. What an agent does only once
in a phase stands in `DEEDS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Phase(enum.Enum):
    """The phase that an agent is in."""

    STARTING = "starting"
    """Some worker has not connected yet."""
    MEETING = "meeting"
    """Its workers are in no generation; it waits for the next to be decided."""
    RUNNING = "running"
    """Its workers train, or are on standby."""
    LEAVING = "leaving"
    """Its workers are to get out of a broken generation."""
    ENDING = "ending"
    """Its workers are to end."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One arrow."""

    before: Phase
    after: Phase
    cause: str
    """What must be so, in words."""


TRANSITIONS = (
    Transition(Phase.STARTING, Phase.MEETING, "every living worker has connected"),
    Transition(Phase.MEETING, Phase.RUNNING, "plan with its workers"),
    Transition(Phase.MEETING, Phase.STARTING, "plan without them"),
    Transition(Phase.RUNNING, Phase.LEAVING, "broken, or the others went on without it"),
    Transition(Phase.RUNNING, Phase.MEETING, "pause, and its workers are out"),
    Transition(Phase.LEAVING, Phase.MEETING, "its workers are out"),
    Transition(Phase.STARTING, Phase.ENDING, "end, asked to leave, or its last worker died"),
    Transition(Phase.MEETING, Phase.ENDING, "end, asked to leave, or its last worker died"),
    Transition(Phase.RUNNING, Phase.ENDING, "end, asked to leave and out, or its last worker died"),
    Transition(Phase.LEAVING, Phase.ENDING, "end, asked to leave and out, or its last worker died"),
)
"""Every way from one phase to another. Invariant: at most one for each pair."""

ALLOWED = frozenset((one.before, one.after) for one in TRANSITIONS)


class Deed(enum.Enum):
    """An action that an agent takes at most once per phase."""

    TELL_WAITING = "log why the meeting waits, once for each reason"
    PROPOSE = "propose the plan of a meeting that it leads"
    PASS_PAUSE = "send its workers the pause"
    TELL_DONE = "publish that all its workers are done"
    TELL_END = "publish that the workers of all nodes are done"
    ASK_BACK = "ask for a pause, for a slow worker that has rested"
    ASK_IN = "ask for a pause, for a worker that is new"
    KILL = "kill a worker that did not obey, once for each"
    FINISH = "end"


DEEDS: Mapping[Deed, frozenset[Phase]] = {
    Deed.TELL_WAITING: frozenset((Phase.MEETING,)),
    Deed.PROPOSE: frozenset((Phase.MEETING,)),
    Deed.PASS_PAUSE: frozenset((Phase.RUNNING,)),
    Deed.TELL_DONE: frozenset((Phase.RUNNING,)),
    Deed.TELL_END: frozenset((Phase.RUNNING,)),
    Deed.ASK_BACK: frozenset((Phase.RUNNING, Phase.LEAVING)),
    Deed.ASK_IN: frozenset((Phase.RUNNING, Phase.LEAVING)),
    Deed.KILL: frozenset((Phase.LEAVING, Phase.ENDING)),
    Deed.FINISH: frozenset((Phase.ENDING,)),
}
"""In which phases each may be done. Another phase is refused."""


def draw_mermaid() -> str:
    """The table as a Mermaid state diagram.

    >>> draw_mermaid().splitlines()[1]
    '    [*] --> starting'
    """
    lines = ["stateDiagram-v2", "    [*] --> starting"]
    lines += [f"    {one.before.value} --> {one.after.value}: {one.cause}" for one in TRANSITIONS]
    return "\n".join([*lines, "    ending --> [*]: all its workers have ended"]) + "\n"
