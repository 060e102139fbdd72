"""The front door: every public name resolves, rooms answer to their name, two of them can be called."""

from __future__ import annotations

import importlib

import pytest

import remesh


@pytest.mark.parametrize("name", remesh.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(remesh, name) is not None


@pytest.mark.parametrize("name", remesh.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert getattr(remesh, name).__doc__


def test_rooms_answer_to_their_name() -> None:
    for name in ("dist_checkpointing", "layout"):
        assert getattr(remesh, name) is importlib.import_module(f"remesh.{name}")


@pytest.mark.parametrize("verb", ["reshard", "elastic"])
def test_a_verb_can_be_called_and_is_still_a_package(verb: str) -> None:
    home = importlib.import_module(f"remesh.{verb}.api")
    assert callable(getattr(remesh, verb))
    assert getattr(remesh, verb).api is home


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = remesh.nonsense


def test_public_names_show_in_dir() -> None:
    assert set(remesh.__all__) <= set(dir(remesh))
