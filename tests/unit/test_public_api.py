"""Public names of the package: each resolves and is documented, and none is also a package."""

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


_ROOMS = ("checkpoint", "dist_checkpointing", "elasticity", "layout", "pipeline", "resharding", "testbed")


@pytest.mark.parametrize("name", _ROOMS)
def test_rooms_that_users_import_answer_to_their_name(name: str) -> None:
    # As a Python asks in which nobody has imported the room before.
    assert remesh.__getattr__(name) is importlib.import_module(f"remesh.{name}")


def test_no_package_has_the_name_of_a_verb() -> None:
    """Importing a package binds its name, so that it would take the place of the verb."""
    assert not {each.name for each in pkgutil.iter_modules(remesh.__path__)} & {*remesh.__all__}


def test_a_name_is_looked_for_once() -> None:
    assert remesh.reshard is vars(remesh)["reshard"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = remesh.nonsense


def test_public_names_show_in_dir() -> None:
    assert set(remesh.__all__) <= set(dir(remesh))
