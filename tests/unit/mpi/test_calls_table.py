"""The table of calls is complete and unambiguous."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remesh.mpi.calls import header
from remesh.mpi.calls.error_classes import CLASSES, TEXTS
from remesh.mpi.calls.table import BY_NUMBER, CALLS, RECORDS, Effect, Replay
from remesh.mpi.lower.serving import OF_ENGINE, Serving
from remesh.mpi.upper.topologies import Cart, balanced_dims


def test_numbers_and_names_are_unique() -> None:
    assert len(BY_NUMBER) == len({call.name for call in CALLS}) == len(CALLS)


def test_every_call_has_a_handler() -> None:
    handled = {call.name for call in CALLS if hasattr(Serving, f"_{call.name}")}
    assert handled | OF_ENGINE == {call.name for call in CALLS} and not handled & OF_ENGINE


def test_the_header_of_the_c_files_says_what_the_tables_say() -> None:
    assert header.PATH.read_text() == header.make_header(), "run `python -m remesh.mpi.calls.header`"


def test_fields_have_one_name_each_and_none_is_missing() -> None:
    for name, (form, fields) in RECORDS.items():
        assert len(set(fields)) == len(fields) == len(form.unpack(bytes(form.size))), name


def test_what_starts_an_operation_is_attached_to_it_after_a_restart_or_still_posted() -> None:
    starting = {call.name for call in CALLS if call.effect not in (Effect.LOCAL, Effect.NOTICE)}
    assert starting == {call.name for call in CALLS if call.replay in (Replay.ATTACH, Replay.POSTED)}


def test_every_error_class_has_a_text() -> None:
    assert len(CLASSES) == len(TEXTS) == len(set(CLASSES.values()))


@given(st.integers(1, 60), st.integers(1, 4))
def test_dims_are_the_most_balanced_factors(num_ranks: int, num_dims: int) -> None:
    def factors(number: int, num: int) -> list[list[int]]:
        if num == 1:
            return [[number]]
        return [[f, *rest] for f in range(1, number + 1) if number % f == 0 for rest in factors(number // f, num - 1)]

    best = min(sorted(some, reverse=True) for some in factors(num_ranks, num_dims))
    assert balanced_dims(num_ranks, [0] * num_dims) == best


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3))
def test_ranks_and_coordinates_are_inverse_and_shifts_are_symmetric(grid: list[tuple[int, bool]]) -> None:
    cart = Cart.of([n for n, _ in grid], [periodic for _, periodic in grid])
    for rank in range(cart.num_ranks):
        assert cart.rank(cart.coords(rank)) == rank
        for direction in range(len(grid)):
            source, destination = cart.shift(rank, direction, 1)
            if destination >= 0:
                assert cart.shift(destination, direction, 1)[0] == rank
            if source >= 0:
                assert cart.shift(source, direction, 1)[1] == rank
