"""The front door: every public name resolves, rooms answer to their name, two of them can be called."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import remesh


@pytest.mark.parametrize("name", remesh.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(remesh, name) is not None


@pytest.mark.parametrize("name", remesh.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert getattr(remesh, name).__doc__


_VERBS = ("reshard", "elastic")
_ROOMS = [each.name for each in pkgutil.iter_modules(remesh.__path__) if each.ispkg]


@pytest.mark.parametrize("name", sorted({*_ROOMS} - {*_VERBS}))
def test_rooms_answer_to_their_name(name: str) -> None:
    # As a Python asks in which nobody has imported the room before.
    assert remesh.__getattr__(name) is importlib.import_module(f"remesh.{name}")


@pytest.mark.parametrize("verb", _VERBS)
def test_a_verb_can_be_called_and_is_still_a_package(verb: str) -> None:
    home = importlib.import_module(f"remesh.{verb}.api")
    assert callable(getattr(remesh, verb))
    assert getattr(remesh, verb).api is home


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = remesh.nonsense


def test_public_names_show_in_dir() -> None:
    assert set(remesh.__all__) <= set(dir(remesh))
