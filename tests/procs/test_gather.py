"""Steps that all ranks do together: each keeps its own value, hears what all told, and raises what any raised."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from remesh.comm.gather import step_together
from remesh.errors import FormatError
from remesh.testing.pool import RankPool


def _keep_and_tell(failing: int) -> tuple[bool, list[Any]]:
    rank = dist.get_rank()
    kept = [object(), rank]

    def step() -> list[Any]:
        if rank == failing:
            raise FormatError("bent", f"bending: rank {rank} broke")
        return kept

    done = step_together(step, doing="bending", tell=lambda value: {"rank": value[1]})
    return done.mine is kept, done.told


def test_each_rank_keeps_its_own_value_and_hears_what_all_told(ranks: RankPool) -> None:
    assert ranks.run(_keep_and_tell, 3, (-1,)) == [(True, [{"rank": rank} for rank in range(3)])] * 3


def _told_error(failing: int) -> tuple[str, str]:
    with pytest.raises(FormatError) as raised:
        _keep_and_tell(failing)
    return raised.value.reason, str(raised.value)


def test_a_step_that_fails_on_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    told = ranks.run(_told_error, 3, (1,))
    assert told == [("bent", "bending: rank 1 broke (raised on rank 1)")] * 3


def _num_tracebacks(raise_it: Callable[[], object]) -> int:
    with pytest.raises(FormatError) as raised:
        step_together(raise_it, doing="bending", tell=lambda value: None)
    return "".join(traceback.format_exception(raised.value)).count("Traceback")


def _give_up() -> None:
    raise FormatError("bent", "bending: it broke")


def _give_up_over_a_fault() -> None:
    try:
        [].pop()
    except IndexError as error:
        raise FormatError("bent", "bending: it broke") from error


def test_only_what_the_text_does_not_say_has_a_traceback_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(_num_tracebacks, 2, (_give_up,)) == [1, 1]
    assert ranks.run(_num_tracebacks, 2, (_give_up_over_a_fault,)) == [2, 2]
