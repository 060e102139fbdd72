"""Programs that nobody has thought of are carried, too; ``hunt.py`` looks for more of them."""

from __future__ import annotations

import pytest

from tests.mpi.hunt import WAYS, Fault, Program, Seen, compare, hunt


@pytest.mark.mpi
@pytest.mark.parametrize(("seed", "num_ranks", "without"), [(1, 2, ""), (20, 3, ""), (21, 2, "files"), (31, 2, "")])
def test_a_program_at_random_gets_what_a_real_mpi_alone_gives_it(seed: int, num_ranks: int, without: str) -> None:
    wrong, caught = hunt(Program(seed, 60, num_ranks, without), tuple(WAYS))
    assert not wrong, "\n".join(wrong)
    assert caught["renewals"] and caught["checkpoints"], caught


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "problem", "fault"),
    [
        ("rank 0 step 0 a.b 00000000\nrank 1 step 0 a.b 00000001rank 1 step 1 c.d 00000002", "", None),
        (
            "rank 1 step 0 a.b 00000009rank 1 step 1 c.d 00000008",
            "",
            Fault("rank 1 got something else in step 0, a.b", 1),
        ),
        ("rank 0 step 0 a.b 00000000", "it hangs", Fault("it hangs", 2)),
        ("", "it hangs", Fault("it hangs", 1)),
        ("rank 0 step 0 a.b 00000000\n", "", Fault("2 lines are missing", 2)),
    ],
)
def test_what_a_run_lacks_is_told_with_the_fewest_steps_that_lack_it(
    text: str, problem: str, fault: Fault | None
) -> None:
    expected = "rank 0 step 0 a.b 00000000rank 1 step 0 a.b 00000001\nrank 1 step 1 c.d 00000002\n"
    assert compare(Seen(expected), Seen(text, problem)) == fault
