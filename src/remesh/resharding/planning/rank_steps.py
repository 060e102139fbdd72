"""Steps of one rank: its messages as a list, and the memory that these need.

Definitions. A receive is *posted* when its buffer is handed to the transport, *taken* when its bytes are there. A send
is *given* when its buffer is handed over, *settled* when the buffer is free again. The *window* W is how many receives
may be posted and not taken, and as many sends given and not settled; it hides latency and bounds staging. It counts
the rank's own messages, because a rank that has something to do in every third round must look as far ahead as one that
is busy in all of them.

Order, for the messages that a rank gives, by round:

1. Post the receives of rounds up to this one, and then on while less than W are posted. Who has W of them posted first
   takes the oldest.
2. Take the message that brings what is given now; others may stay posted.
3. Settle the oldest send when W are unsettled. Give.

Then the remaining receives, in their order, then the remaining sends.

Why no rank waits for ever: of all ranks that wait, look at the one whose awaited message has the lowest round r. If it
waits to take, the giver has not given yet, so it waits itself, in a step before that give: it takes the oldest of more
than W receives of rounds up to r, or what it needs, or settles an older send. All these are of rounds below r, and none
is lower than r. If it waits to settle, the taker has not posted yet, so it waits in a step before that post: again to
take something older, or for a give of a round below r. This needs W >= 1.

Memory: a buffer lives from its post or its give to the last step that needs it. Counting every message as staged,
also those that the transport can take from their place, the peak along the steps is a promise that a run keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from remesh.resharding.model.program import Message

DEFAULT_WINDOW = 8
"""How many receives are posted at a time, and sends unsettled, at the most.

Four times as many pass a chain of short chunks on a quarter faster over loopback, where each turn of a processor is a
few ms, and mix rounds over a network: a broadcast to two hosts took 1.26 instead of 1.05 times its bound.
"""
_NARROW_WINDOW = 2
_WINDOW_BYTES = 8 << 20
"""A window of long messages is narrower: new memory costs as much as a copy, and a few of them hide any latency."""


class Act(Enum):
    """The action of a step on its message."""

    POST = "post"
    """Hand the buffer of a receive to the transport."""
    TAKE = "take"
    """Wait until a posted receive is there, and put it where it belongs."""
    GIVE = "give"
    """Hand the buffer of a send to the transport."""
    SETTLE = "settle"
    """Wait until the oldest unsettled send has left."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a rank does."""

    act: Act
    message: Message


def choose_window(largest_bytes: int) -> int:
    """The window for messages of at most this size.

    >>> choose_window(128 << 10), choose_window(4 << 20)
    (8, 2)
    """
    return max(_NARROW_WINDOW, min(DEFAULT_WINDOW, _WINDOW_BYTES // max(largest_bytes, 1)))


def compute_steps(
    gives: Sequence[Message], takes: Sequence[Message], needs: Mapping[int, int], window: int
) -> tuple[Step, ...]:
    """The steps of one rank; ``gives`` and ``takes`` are by round.

    ``needs`` maps the chunk of a message that is given to the round in which the rank takes what it needs for it;
    chunks that are given from the rank's own memory are not in it.
    """
    steps: list[Step] = []
    to_post = deque(takes)
    posted: dict[int, Message] = {}
    """By round, oldest first."""
    unsettled: deque[Message] = deque()

    def take(round_: int) -> None:
        steps.append(Step(Act.TAKE, posted.pop(round_)))

    def post(up_to_round: int) -> None:
        while to_post and (len(posted) < window or to_post[0].round <= up_to_round):
            if len(posted) == window:
                take(next(iter(posted)))
            message = to_post.popleft()
            posted[message.round] = message
            steps.append(Step(Act.POST, message))

    for message in gives:
        post(message.round)
        needed = needs.get(message.chunk)
        if needed in posted:
            take(needed)
        if len(unsettled) == window:
            steps.append(Step(Act.SETTLE, unsettled.popleft()))
        unsettled.append(message)
        steps.append(Step(Act.GIVE, message))
    while to_post or posted:
        post(-1)
        take(next(iter(posted)))
    steps += (Step(Act.SETTLE, message) for message in unsettled)
    return tuple(steps)


def compute_peak_bytes(
    steps: Sequence[Step], nbytes: Sequence[int] | Mapping[int, int], passed_on: Mapping[int, Sequence[int]]
) -> int:
    """Most bytes of message buffers that are alive at once along the steps, were every message staged.

    ``nbytes[chunk]`` is the size of a chunk. ``passed_on`` maps a chunk that is taken and passed on to the chunk
    numbers under which it is given, once for each time: its buffer lives until the last of these has settled.
    """
    source = {given: taken for taken, givens in passed_on.items() for given in givens}
    uses_left = {taken: len(givens) for taken, givens in passed_on.items()}
    alive = peak = 0
    for step in steps:
        chunk = step.message.chunk
        if step.act is Act.POST or (step.act is Act.GIVE and chunk not in source):
            alive += nbytes[chunk]
            peak = max(peak, alive)
        elif step.act is Act.TAKE and chunk not in uses_left:
            alive -= nbytes[chunk]
        elif step.act is Act.SETTLE:
            origin = source.get(chunk)
            if origin is None:
                alive -= nbytes[chunk]
                continue
            uses_left[origin] -= 1
            if uses_left[origin] == 0:
                alive -= nbytes[origin]
    return peak
