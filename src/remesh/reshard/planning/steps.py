"""What does a rank do next? A rank's messages as a list of steps, and the memory these need.

Definitions. A receive is *posted* when its buffer is handed to the transport, *taken* when its bytes are there. A send
is *given* when its buffer is handed over, *settled* when the buffer is free again. The *window* W is how many rounds
ahead receives are posted; it hides latency and bounds staging.

Order, for the messages that a rank gives, by round: post the receives of the next W rounds; take those that are W
rounds old, and the one that brings what is given now; settle sends beyond W; give. Then the remaining receives, round
by round, then the remaining sends. With W = 2 (rounds run to the right, time runs down):

       round    0    1    2    3
                pg   p    p              p = post, t = take, g = give
                t    g         p         what arrived in round 0 can be passed on in round 1
                     t    g         p

Why nobody waits for ever: take the ranks whose current round is the lowest. Each of them waits for a message of an
earlier round, or to receive in this one. The other end of an earlier message has passed its round, so both halves are
posted and it completes; after that all of these ranks send, and the messages of this round complete as well. This
needs W >= 1.

Memory: a buffer lives from its post or its give to the last step that needs it. Counting every message as staged,
also those that the transport can take from their place, the peak along the steps is a promise that a run keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from remesh.reshard.model.program import Message

DEFAULT_WINDOW_ROUNDS = 4
"""How many rounds ahead receives are posted."""


class Act(Enum):
    """What a step does with its message."""

    POST = "post"
    """Hand the buffer of a receive to the transport."""
    TAKE = "take"
    """Wait until the oldest posted receive is there, and put it where it belongs."""
    GIVE = "give"
    """Hand the buffer of a send to the transport."""
    SETTLE = "settle"
    """Wait until the oldest unsettled send has left."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a rank does."""

    act: Act
    message: Message


def compute_steps(
    gives: Sequence[Message], takes: Sequence[Message], needs: Mapping[int, int], window_rounds: int
) -> tuple[Step, ...]:
    """The steps of one rank; ``gives`` and ``takes`` are by round.

    ``needs`` maps the chunk of a message that is given to the round in which the rank takes what it needs for it;
    chunks that are given from the rank's own memory are not in it.
    """
    steps: list[Step] = []
    to_post = deque(takes)
    posted: deque[Message] = deque()
    unsettled: deque[Message] = deque()

    def post_until(round_: int) -> None:
        while to_post and to_post[0].round <= round_:
            posted.append(to_post.popleft())
            steps.append(Step(Act.POST, posted[-1]))

    def take_until(round_: int) -> None:
        while posted and posted[0].round <= round_:
            steps.append(Step(Act.TAKE, posted.popleft()))

    for message in gives:
        post_until(message.round + window_rounds)
        take_until(max(message.round - window_rounds, needs.get(message.chunk, -1)))
        while len(unsettled) > window_rounds:
            steps.append(Step(Act.SETTLE, unsettled.popleft()))
        unsettled.append(message)
        steps.append(Step(Act.GIVE, message))
    while to_post or posted:
        now = posted[0].round if posted else to_post[0].round
        post_until(now + window_rounds)
        take_until(now)
    steps += (Step(Act.SETTLE, message) for message in unsettled)
    return tuple(steps)


def compute_peak_bytes(steps: Sequence[Step], nbytes: Sequence[int], passed_on: Mapping[int, Sequence[int]]) -> int:
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
