"""Generators of the known pipeline schedules (GPipe, 1F1B, eager 1F1B, zero bubble), all by one rule.

A stage is described by two numbers. Its *warm-up* ``w`` is how many forwards it does before its first backward; its
*delay* ``d`` is how many backwards run ahead of their weight gradients. The rule:

    F0 .. F(min(M, w) - 1);  for b in 0 .. M-1:  { I_b;  if b + 1 - (Ws done) > d: next W;  next F, if any };  other Ws

Without a delay (`None`) the backward is whole: B_b stands for I_b and W_b. With ``d = 0`` W follows its I at once, but
the gradient of the inputs is already on its way. A stage holds at most ``w + d`` micro-batches.

=====================  ==================  =========  =========================================================
schedule               warm-up of stage i  delay      source
=====================  ==================  =========  =========================================================
``gpipe``              M                   whole      arXiv 1811.06965
``one_f_one_b``        S - i               whole      arXiv 1806.03377, 2104.04473
``eager_one_f_one_b``  2 (S - i) - 1       whole      arXiv 2211.05322, section 4, whose ``i`` counts from 1
``one_f_one_b_split``  S - i               as given   arXiv 2211.05322, "backward weight delaying"
``eager_split``        2 (S - i) - 1       as given   both of arXiv 2211.05322 together
``zero_bubble_h1``     S - i               i          arXiv 2401.10241, figure 3: as many on every stage as on the first
=====================  ==================  =========  =========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from remesh.pipeline.actions import Action, ActionKind
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.schedule import Schedule

Delays = int | Sequence[int | None] | None
"""One delay for all stages, or one for each; None for a whole backward."""


def build_schedule(name: str, num_microbatches: int, warmups: Sequence[int], delays: Delays = None) -> Schedule:
    """The schedule with this warm-up and delay on each stage; one stage for each warm-up.

    `PipelineError` when a warm-up is not in 1 to M: fewer micro-batches than the warm-up needs.

    >>> [str(action) for action in build_schedule("mine", 3, [2, 1], 0).rows[0]]
    ['0F0', '0F1', '0I0', '0W0', '0F2', '0I1', '0W1', '0I2', '0W2']
    """
    if num_microbatches < 1:
        raise PipelineError(
            f"building the schedule {name!r}: expected at least 1 micro-batch, found {num_microbatches}; a step "
            "computes its batch in that many parts"
        )
    num_stages = len(warmups)
    of_stage = [delays] * num_stages if delays is None or isinstance(delays, int) else list(delays)
    if len(of_stage) != num_stages:
        raise PipelineError(
            f"building the schedule {name!r}: expected a delay for each of {num_stages} stages, found {len(of_stage)}"
        )
    for stage, (warmup, delay) in enumerate(zip(warmups, of_stage, strict=True)):
        if not 1 <= warmup <= num_microbatches:
            raise PipelineError(
                f"building the schedule {name!r}: stage {stage} is to do {warmup} forwards before its first backward, "
                f"expected 1 to {num_microbatches}, the number of micro-batches; use more of them or a smaller warm-up"
            )
        if delay is not None and delay < 0:
            raise PipelineError(f"building the schedule {name!r}: stage {stage} has the delay {delay}, expected >= 0")
    rows = tuple(
        build_row(stage, num_microbatches, warmup, delay)
        for stage, (warmup, delay) in enumerate(zip(warmups, of_stage, strict=True))
    )
    return Schedule(name, num_stages, num_microbatches, rows)


def build_row(stage: int, num_microbatches: int, warmup: int, delay: int | None) -> tuple[Action, ...]:
    """The row of one stage by the rule above; the warm-up is 1 to M, the delay >= 0 or None."""
    row = [Action(stage, ActionKind.F, number) for number in range(warmup)]
    backward = ActionKind.B if delay is None else ActionKind.I
    num_forwards, num_weights = warmup, 0
    for number in range(num_microbatches):
        row.append(Action(stage, backward, number))
        if delay is not None and number + 1 - num_weights > delay:
            row.append(Action(stage, ActionKind.W, num_weights))
            num_weights += 1
        if num_forwards < num_microbatches:
            row.append(Action(stage, ActionKind.F, num_forwards))
            num_forwards += 1
    if delay is not None:
        row += [Action(stage, ActionKind.W, number) for number in range(num_weights, num_microbatches)]
    return tuple(row)


def plain_warmups(num_stages: int, num_microbatches: int) -> list[int]:
    """Warm-up of 1F1B on each stage: just enough that the last one need not wait, if transfers took no time."""
    return [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]


def eager_warmups(num_stages: int, num_microbatches: int) -> list[int]:
    """Warm-up of eager-1F1B on each stage: one more micro-batch under way for each hop to the last stage."""
    return [min(num_microbatches, 2 * (num_stages - stage) - 1) for stage in range(num_stages)]


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return build_schedule("gpipe", num_microbatches, [num_microbatches] * num_stages)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B: after the warm-up one backward, one forward, and so on."""
    return build_schedule("1f1b", num_microbatches, plain_warmups(num_stages, num_microbatches))


def eager_one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with the longer warm-up, under which forward transfers disappear."""
    return build_schedule("eager-1f1b", num_microbatches, eager_warmups(num_stages, num_microbatches))


def one_f_one_b_split(num_stages: int, num_microbatches: int, delay: Delays = 0) -> Schedule:
    """1F1B that sends the gradients of the inputs before it computes those of the weights."""
    return build_schedule("1f1b-split", num_microbatches, plain_warmups(num_stages, num_microbatches), delay)


def eager_split(num_stages: int, num_microbatches: int, delay: Delays = 0) -> Schedule:
    """eager-1F1B that sends the gradients of the inputs before it computes those of the weights."""
    return build_schedule("eager-split", num_microbatches, eager_warmups(num_stages, num_microbatches), delay)


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B's warm-up, and on stage ``i`` weight gradients ``i`` micro-batches late, which fill the drain."""
    warmups = plain_warmups(num_stages, num_microbatches)
    return build_schedule("zb-h1", num_microbatches, warmups, list(range(num_stages)))


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "1f1b-split": one_f_one_b_split,
    "eager-split": eager_split,
    "zb-h1": zero_bubble_h1,
}
"""Name to the function of (number of stages, number of micro-batches)."""
