"""Stages that compute nothing and take as long as they should: for more stages than the machine has cores.

A stub sleeps in its forward, in the backward of its input, and in the backward of its weight; what it makes has the
size it should. The first stage has no input with a gradient, so both parts of its backward are in that of its weight,
as they are in a real first stage.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the parts of a micro-batch take, in seconds."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float


class _SleepBack(torch.autograd.Function):
    """The value as it is; sleeps in the backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        sleep_until(time.monotonic() + ctx.seconds)
        return gradient, None


class Stub(nn.Module):
    """One stage: takes any values, makes those of the given number of elements."""

    def __init__(self, pace: Pace, makes: dict[str, int], *, is_first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.pace = pace
        self.makes = makes
        self.weight_s = pace.weight_grad_s + (pace.input_grad_s if is_first else 0.0)

    def forward(self, **taken: torch.Tensor) -> dict[str, torch.Tensor] | torch.Tensor:
        end_s = time.monotonic() + self.pace.forward_s
        weight = _SleepBack.apply(self.weight, self.weight_s)
        # One number of each input, so that all of them have gradients and nothing is computed.
        total = sum((value.reshape(-1)[:1] for value in taken.values()), torch.zeros(1))
        total = _SleepBack.apply(total, self.pace.input_grad_s) + weight
        made = {name: total.expand(size).contiguous() for name, size in self.makes.items()}
        sleep_until(end_s)
        return made or total.sum()


def sleep_until(moment_s: float) -> None:
    """Sleep to a moment of the monotonic clock, which sleeping alone overshoots by what wakes it up."""
    while (left_s := moment_s - time.monotonic()) > 0:
        time.sleep(max(left_s - 0.0002, 0.0))
