"""The table of calls is complete and unambiguous."""

from __future__ import annotations

from remesh.carried.mpi.calls import calls_header
from remesh.carried.mpi.calls.error_classes import CLASSES, TEXTS
from remesh.carried.mpi.calls.table import BY_NUMBER, CALLS, RECORDS, Effect, Replay
from remesh.carried.mpi.lower.serving import OF_ENGINE, Serving


def test_numbers_and_names_are_unique() -> None:
    assert len(BY_NUMBER) == len({call.name for call in CALLS}) == len(CALLS)


def test_every_call_has_a_handler() -> None:
    handled = {call.name for call in CALLS if hasattr(Serving, f"_{call.name}")}
    assert handled | OF_ENGINE == {call.name for call in CALLS} and not handled & OF_ENGINE


def test_the_header_of_the_c_files_says_what_the_tables_say() -> None:
    assert calls_header.PATH.read_text() == calls_header.make_header(), (
        "run `python -m remesh.carried.mpi.calls.calls_header`"
    )


def test_fields_have_one_name_each_and_none_is_missing() -> None:
    for name, (form, fields) in RECORDS.items():
        assert len(set(fields)) == len(fields) == len(form.unpack(bytes(form.size))), name


def test_what_starts_an_operation_is_attached_to_it_after_a_restart_or_still_posted() -> None:
    starting = {call.name for call in CALLS if call.effect not in (Effect.LOCAL, Effect.NOTICE)}
    assert starting == {call.name for call in CALLS if call.replay in (Replay.ATTACH, Replay.POSTED)}


def test_every_error_class_has_a_text() -> None:
    assert len(CLASSES) == len(TEXTS) == len(set(CLASSES.values()))
