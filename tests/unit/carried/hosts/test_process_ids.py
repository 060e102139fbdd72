"""Process ids of the programs of a job."""

from __future__ import annotations

import pytest

from remesh.carried.hosts.process_ids import find_process_id
from remesh.wire.token import Token

_LEAST, _MOST = 300, 32_767
"""What each kernel gives a second time, and the highest id that each has."""


@pytest.mark.parametrize("num_ranks", [1, 2, 7, 1000, 20_000, 31_000])
def test_ranks_of_a_job_have_ids_of_their_own_which_each_kernel_has(num_ranks: int) -> None:
    found = [find_process_id(rank, num_ranks, Token("", b"a" * 32)) for rank in range(num_ranks)]
    assert len(set(found)) == num_ranks
    assert min(found) >= _LEAST
    assert max(found) <= _MOST


def test_ranks_have_room_for_the_ids_of_their_threads_and_children() -> None:
    first, second = (find_process_id(rank, 8, Token("", b"a" * 32)) for rank in range(2))
    assert second - first > 3000


def test_jobs_begin_at_ids_of_their_own() -> None:
    found = {find_process_id(0, 4, Token("", bytes([number]) * 32)) for number in range(50)}
    assert len(found) > 45


def test_more_ranks_than_ids_begin_again_with_the_first_id() -> None:
    found = [find_process_id(rank, 100_000, Token("", b"a" * 32)) for rank in (0, 31_000, 99_999)]
    assert found[0] == found[1]
    assert min(found) >= _LEAST
    assert max(found) <= _MOST
