"""Handles, errors and callbacks behave as mpi4py's do, where no other rank is needed."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import remesh
from remesh.mpi.calls.error_classes import CLASSES
from remesh.mpi.upper import constants as k
from remesh.mpi.upper import exceptions as errors
from remesh.mpi.upper.datatype import PREDEFINED, Datatype
from remesh.mpi.upper.errhandling import WithErrhandler
from remesh.mpi.upper.exceptions import ERRORS_RETURN, Errhandler
from remesh.mpi.upper.handles import name_predefined
from remesh.mpi.upper.objects import _in_turn
from remesh.mpi.upper.op import Op
from remesh.mpi.upper.private_names import handle_of
from remesh.mpi.upper.request import Grequest
from remesh.mpi.upper.status import Status
from remesh.mpi.upper.topologies import DistGraph


def test_freeing_safely_leaves_what_is_predefined() -> None:
    original = PREDEFINED["INT"]
    name_predefined({"INT": original})
    other = Datatype(original)
    for _ in range(2):
        original.free()
        other.free()
    assert original and not other
    made = Op.Create(lambda *_: None)
    twin = Op(made)
    made.free()
    assert not made and twin


def test_handles_are_not_keys_of_dictionaries() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(PREDEFINED["INT"])


def test_a_number_is_given_for_objects_of_mpi_only() -> None:
    assert handle_of(Datatype()) == 0 < handle_of(Status())
    with pytest.raises(TypeError, match="NoneType"):
        handle_of(None)  # type: ignore[arg-type]


class _OfAProgram(Status):
    pass


def test_a_status_of_a_programs_own_class_keeps_it_in_a_pickle() -> None:
    status = _OfAProgram()
    status.source = 3
    assert type(pickle.loads(pickle.dumps(status))) is _OfAProgram
    assert pickle.loads(pickle.dumps(status)) == status


def test_errors_of_the_program_are_taken_back_from_the_text_up() -> None:
    error_class = errors.Add_error_class()
    code = errors.Add_error_code(error_class)
    errors.Add_error_string(code, "too much")
    for remove, number, reason in (
        (errors.Remove_error_class, error_class, "still has codes"),
        (errors.Remove_error_code, code, "still has a text"),
        (errors.Remove_error_class, code, "is not one"),
        (errors.Remove_error_code, 0, "is not one"),
    ):
        with pytest.raises(errors.Exception, match=reason):
            remove(number)
    errors.Remove_error_string(code)
    errors.Remove_error_code(code)
    errors.Remove_error_class(error_class)
    with pytest.raises(errors.Exception, match="is not one"):
        errors.Remove_error_class(error_class)


def _buffer_error(*_: Any) -> None:
    raise errors.failure("ERR_BUFFER")


def _value_error(*_: Any) -> None:
    raise ValueError(42)


@pytest.mark.parametrize(("raises", "name"), [(_buffer_error, "ERR_BUFFER"), (_value_error, "ERR_OTHER")])
@pytest.mark.parametrize("place", ["query_fn", "free_fn", "cancel_fn"])
def test_a_callback_that_raises_fails_the_call_and_is_shown(
    place: str, raises: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request = Grequest.Start(**{place: raises})
    if place != "cancel_fn":
        request.Complete()
    with pytest.raises(errors.Exception) as caught:
        (request.Cancel if place == "cancel_fn" else request.Wait)()
    assert caught.value.Get_error_class() == CLASSES[name]
    assert capsys.readouterr().err.startswith("Traceback")
    if place == "cancel_fn":
        request.Complete()
        request.Wait()
    assert not request


class _Handled(WithErrhandler):
    def __init__(self) -> None:
        self._content = SimpleNamespace(errhandler=None)


def test_a_handler_that_returns_does_nothing_and_one_of_the_program_is_called() -> None:
    thing, seen = _Handled(), []
    assert thing.Get_errhandler() == ERRORS_RETURN
    thing.Call_errhandler(CLASSES["ERR_OTHER"])
    thing.Set_errhandler(_Handled.Create_errhandler(lambda who, code: seen.append((who, code))))
    thing.Call_errhandler(0)
    thing.Call_errhandler(CLASSES["ERR_OTHER"])
    assert seen == [(thing, CLASSES["ERR_OTHER"])]
    with pytest.raises(errors.Exception, match="null"):
        thing.Set_errhandler(Errhandler())


@pytest.mark.parametrize("weights", [k.WEIGHTS_EMPTY, [], [1, 2]])
def test_every_edge_has_its_weight(weights: Any) -> None:
    with pytest.raises(ValueError, match="of 1 edges"):
        DistGraph.of([0], [0], weights, None)
    assert DistGraph.of([], [], k.WEIGHTS_EMPTY, k.UNWEIGHTED).source_weights == ()


def test_threads_take_turns_in_a_collective_of_several_steps() -> None:
    members: Any = SimpleNamespace(locks={})

    @_in_turn
    def gather(members: Any) -> bool:
        held: bool = members.locks["gather"].locked()
        return held

    assert gather(members) and not members.locks["gather"].locked()


def test_only_options_of_mpi4py_can_be_set() -> None:
    path = Path(remesh.__file__).parent / "mpi" / "substitute" / "mpi4py" / "__init__.py"
    spec = importlib.util.spec_from_file_location("substitute_of_mpi4py", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.rc(threads=False)
    assert module.rc.threads is False
    for wrong in (lambda: module.rc(other=1), lambda: setattr(module.rc, "other", 1)):
        with pytest.raises(TypeError, match="other"):
            wrong()
